"""What all tables share: names for every constraint, and column types that change nothing."""

from datetime import datetime
from typing import Annotated, Any

from sqlalchemy import LargeBinary, MetaData, String
from sqlalchemy.orm import DeclarativeBase, mapped_column

from quantwatch.store.types import FiniteFloat, StrictJson, UtcDateTime, WholeNumber, Words

# Unnamed constraints can't be changed later in SQLite, which rebuilds the table for it.
_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

Key = Annotated[int, mapped_column(primary_key=True, autoincrement=True)]
Count = Annotated[int, mapped_column(WholeNumber)]
Prose = Annotated[str, mapped_column(Words)]
JsonDocument = Annotated[Any, mapped_column(StrictJson)]


class Base(DeclarativeBase):
    """The declarative base of every table."""

    metadata = MetaData(naming_convention=_NAMES)
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own class attribute
        str: String(),
        float: FiniteFloat(),
        datetime: UtcDateTime(),
        bytes: LargeBinary(),
    }
