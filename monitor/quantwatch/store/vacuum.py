"""Give freed pages of a SQLite file back to its disk, a slice at a time. PostgreSQL does it itself.

Never `VACUUM`: it locks the database for as long as copying all of it takes.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from sqlalchemy.orm import Session

from quantwatch.store.failures import clear_errors
from quantwatch.store.session import Database

SLICE_PAGES = 500
"""Pages per transaction: 2 MB, some 10 ms."""
_INCREMENTAL = 2


def give_back(db: Database, may_go_on: Callable[[Session], bool], deadline: float) -> int:
    """Return how many bytes went back to the disk before the deadline (monotonic seconds).

    A file made without `auto_vacuum = INCREMENTAL` never shrinks; its free pages are used again.
    """
    if db.engine.dialect.name != "sqlite":
        return 0
    given = 0
    while time.monotonic() < deadline and _is_quiet(db, may_go_on) and (freed := _slice(db)):
        given += freed
    if given:
        checkpoint(db)
    return given


def checkpoint(db: Database) -> None:
    """Move SQLite's write-ahead log into the file and cut it, without waiting for anybody."""
    if db.engine.dialect.name != "sqlite":
        return
    with _outside_transactions(db) as connection:
        for pragma in ("busy_timeout = 0", "wal_checkpoint(PASSIVE)", "wal_checkpoint(TRUNCATE)"):
            connection.execute(f"PRAGMA {pragma}").fetchall()


def _is_quiet(db: Database, may_go_on: Callable[[Session], bool]) -> bool:
    with db.reader() as session:
        return may_go_on(session)


def _slice(db: Database) -> int:
    """Free one slice in a transaction of its own; return its bytes, 0 when nothing is left."""
    with _outside_transactions(db) as connection:
        if _pragma(connection, "auto_vacuum") != _INCREMENTAL:
            return 0
        before = _pragma(connection, "freelist_count")
        if before:
            # `execute` would free the first page only: it takes one step of a statement
            # without columns, a script takes all.
            connection.executescript(f"PRAGMA incremental_vacuum({SLICE_PAGES})")
        freed = before - _pragma(connection, "freelist_count")
        return freed * _pragma(connection, "page_size")


@contextmanager
def _outside_transactions(db: Database) -> Iterator[sqlite3.Connection]:
    with clear_errors(db.name), closing(db.engine.raw_connection()) as pooled:
        connection = pooled.driver_connection
        assert isinstance(connection, sqlite3.Connection)
        yield connection


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    found: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return found
