"""Engines: how a connection to each database is opened, and how its transactions begin.

sqlite3's own transaction control is switched off (`isolation_level = None`) and SQLAlchemy's
`begin` event says BEGIN: IMMEDIATE for writers, because a transaction that reads first and writes
later fails at once under WAL, whatever the busy timeout is.
"""

import os
import sqlite3
import time

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

from quantwatch.errors import StoreError
from quantwatch.store.urls import SqliteFile, shown

BEGIN = "quantwatch_begin"
"""Execution option of a connection: the statement that starts its transactions in SQLite."""

_PEER_IS_GONE = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""A server that vanished without a word is noticed within 30 s; Linux alone waits for hours."""


def sqlite_engine(url: URL, *, mode: str, wait_s: float, foreign_keys: bool = True) -> Engine:
    """Return an engine on a SQLite file. `mode` is `ro`, `rw` or `rwc` (may create the file).

    No pool: a connection costs a fifth of a millisecond, and none is ever shared between threads.
    """
    file = SqliteFile.of(url)

    def connect() -> sqlite3.Connection:
        target = file.uri(mode)
        # Asked each time: a service may have begun to write since the last connection.
        if mode == "ro" and _never_changes(file):
            target += "&immutable=1"
        # `timeout` is the busy timeout: it must hold before the first PRAGMA.
        connection = sqlite3.connect(
            target, uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection, shown(url), mode, wait_s)
            connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        except BaseException:
            connection.close()
            raise
        return connection

    engine = create_engine("sqlite+pysqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(BEGIN, "BEGIN"))

    return engine


def postgres_engine(url: URL, *, wait_s: float) -> Engine:
    """Return an engine on a PostgreSQL server. `wait_s` bounds connecting and waiting for locks."""
    return create_engine(
        url,
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": max(2, round(wait_s)),
            "options": f"-c lock_timeout={round(wait_s * 1000)} -c timezone=UTC",
            "application_name": "quantwatch",
            **_PEER_IS_GONE,
        },
    )


def _prepare(connection: sqlite3.Connection, name: str, mode: str, wait_s: float) -> None:
    """Switch to WAL, in which readers never wait for the writer, unless read-only."""
    if mode == "ro":
        return
    if mode == "rwc":
        # Before the first page is written, or never: lets retention give pages back in slices.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            journal = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as error:
            # Two first openers at once: SQLite does not wait here, so we do.
            busy = error.sqlite_errorname.startswith("SQLITE_BUSY")
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    if journal != "wal":
        raise StoreError(
            f"Database {name} can't keep a write-ahead log (journal mode {journal}): put it on a "
            "local disk, not on a network file system."
        )
    connection.execute("PRAGMA synchronous = NORMAL")


def _never_changes(file: SqliteFile) -> bool:
    """Say whether the file lies in a folder nobody here can write to, with nothing in its log.

    A WAL database in such a place opens only as immutable: SQLite can't create its index file.
    """
    log = file.path.with_name(file.path.name + "-wal")
    empty = not log.exists() or log.stat().st_size == 0
    return empty and not os.access(file.path.parent, os.W_OK)
