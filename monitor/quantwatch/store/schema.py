"""Which schema a database has, against the one this program knows. Needs no Alembic."""

from typing import Literal

from sqlalchemy import Connection, inspect, text
from sqlalchemy.orm import Session

from quantwatch.errors import NoDatabaseError, StoreError

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009")
"""Every migration, oldest first. A test holds this equal to the files in migrations/versions."""

SchemaState = Literal["current", "behind", "ahead", "empty"]


def state_of(connection: Connection, name: str) -> SchemaState:
    """Return how the schema compares with this one's; raises NoDatabaseError on foreign tables."""
    tables = inspect(connection).get_table_names()
    if "alembic_version" not in tables:
        if tables:
            raise NoDatabaseError(
                f"Database {name} holds tables of another program ({', '.join(tables[:3])}, …); "
                "name an empty one."
            )
        return "empty"
    revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if revision is None:
        return "empty"
    if revision not in REVISIONS:
        return "ahead"
    return "current" if revision == REVISIONS[-1] else "behind"


def require_current(state: SchemaState, name: str) -> None:
    """Raise StoreError, with the fix, unless the schema is the one this program knows."""
    if state == "empty":
        raise StoreError(f"Database {name} has no tables yet; run `quantwatch db upgrade`.")
    if state == "behind":
        raise StoreError(
            f"Database {name} has the schema of an older quantwatch; run `quantwatch db upgrade` "
            "(make a copy with `quantwatch db backup` first)."
        )
    if state == "ahead":
        raise StoreError(
            f"Database {name} has the schema of a newer quantwatch; update this program."
        )


def revision(session: Session) -> str | None:
    """Return the newest migration that this database has."""
    found = session.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)
