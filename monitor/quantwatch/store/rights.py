"""What the database lets us do: asked in a transaction that is rolled back."""

from datetime import datetime

from sqlalchemy import text

from quantwatch.store import clock
from quantwatch.store.session import Database

_PROBE = "quantwatch_preflight"


class _RollBackError(Exception):
    """Ends the transaction without leaving anything behind."""


def try_rights(db: Database) -> None:
    """Create a table, write to it, and undo both. Raises StoreError when one is not allowed."""
    try:
        with db.writer() as session:
            for statement in (
                f"CREATE TABLE {_PROBE} (id INTEGER PRIMARY KEY)",
                f"INSERT INTO {_PROBE} (id) VALUES (1)",
                f"DELETE FROM {_PROBE}",
            ):
                session.execute(text(statement))
            raise _RollBackError
    except _RollBackError:
        return


def clock_of(db: Database) -> datetime:
    """Return the time by the database's clock."""
    with db.reader() as session:
        return clock.now(session)
