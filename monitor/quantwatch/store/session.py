"""The open database: one transaction per `with`, readers that never write, errors in one line."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from quantwatch.errors import NoDatabaseError, StoreError
from quantwatch.observability import meters
from quantwatch.store.clock import SHIFT
from quantwatch.store.engines import BEGIN, postgres_engine, sqlite_engine
from quantwatch.store.failures import clear_errors
from quantwatch.store.schema import require_current, state_of
from quantwatch.store.urls import SqliteFile, parse_url, shown

WAIT_S = 10.0
"""How long a lock is waited for before the run fails with one line."""


class Database:
    """An engine and its two kinds of transaction. Safe to share between threads."""

    def __init__(self, url: str, engine: Engine, name: str, *, read_only: bool) -> None:
        self.url = url
        self.engine = engine
        self.name = name
        """The URL without its password, for messages."""
        self.read_only = read_only
        self.clock_shift = timedelta()
        """Added to the database's clock; only tests move it."""

    def __repr__(self) -> str:
        return f"Database({self.name})"

    @contextmanager
    def reader(self) -> Iterator[Session]:
        """Open a transaction that sees one state of the database and can't write."""
        options = {BEGIN: "BEGIN"}
        if self.engine.dialect.name == "postgresql":
            options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": "on"}
        with self._transaction(options) as session:
            yield session

    @contextmanager
    def writer(self) -> Iterator[Session]:
        """Open a transaction that is committed at the end of the body, or not at all."""
        if self.read_only:
            raise StoreError(f"Database {self.name} is opened read-only; nothing can be written.")
        asked = time.monotonic()
        with self._transaction({BEGIN: "BEGIN IMMEDIATE"}) as session:
            meters.DB_LOCK_WAIT.observe(time.monotonic() - asked)
            yield session

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Make many short transactions cheap: with the last connection, SQLite folds in its log."""
        if self.engine.dialect.name != "sqlite":
            yield
            return
        with clear_errors(self.name):
            kept = self.engine.raw_connection()
        try:
            yield
        finally:
            kept.close()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def _transaction(self, options: dict[str, str]) -> Iterator[Session]:
        with (
            clear_errors(self.name),
            self.engine.connect().execution_options(**options) as connection,
            connection.begin(),
            Session(connection, autoflush=False, info={SHIFT: self.clock_shift}) as session,
        ):
            yield session
            session.flush()


def open_database(
    url: str, *, read_only: bool = False, check_schema: bool = True, wait_s: float = WAIT_S
) -> Database:
    """Open a database that exists. Raises StoreError naming the database, the trouble and the fix,
    NoDatabaseError (the user's to mend) where there is none.

    A SQLite file is never created here: `upgrade.upgrade` does that.
    """
    parsed = parse_url(url)
    name = shown(parsed)
    if parsed.get_backend_name() == "sqlite":
        file = SqliteFile.of(parsed)
        read_only = read_only or file.read_only
        file.require_place(name)
        if not file.path.exists():
            hint = "run `quantwatch db upgrade`"
            raise NoDatabaseError(f"Database {name} does not exist yet; {hint}.")
        engine = sqlite_engine(parsed, mode="ro" if read_only else "rw", wait_s=wait_s)
    else:
        engine = postgres_engine(parsed, wait_s=wait_s)
    database = Database(url, engine, name, read_only=read_only)
    if check_schema:
        _check_schema(database)
    return database


def _check_schema(database: Database) -> None:
    try:
        with database.reader() as session:
            require_current(state_of(session.connection(), database.name), database.name)
    except BaseException:
        database.close()
        raise
