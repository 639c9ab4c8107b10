"""A condition on many values as one parameter: SQLite takes 32,766 of them, PostgreSQL 65,535."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import JSON, BigInteger, ColumnElement, cast, func, literal, select
from sqlalchemy.orm import Session

from quantwatch.store.types import dump_json


def among(
    session: Session, column: Any, values: Collection[str] | Collection[int]
) -> ColumnElement[bool]:
    """Return the condition that a column of text, or of whole numbers, is one of many values."""
    document = dump_json(list(values))
    if session.get_bind().dialect.name == "postgresql":
        value: Any = func.json_array_elements_text(cast(literal(document), JSON))
        is_text = column.type.python_type is str
        listed = select(value if is_text else cast(value, BigInteger))
    else:
        listed = select(func.json_each(document).table_valued("value").c.value)
    found: ColumnElement[bool] = column.in_(listed)
    return found
