"""Bring a database's schema to this program's. Safe when several processes do it at once."""

from pathlib import Path
from typing import Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, text

import quantwatch
from quantwatch.errors import NoDatabaseError, StoreError
from quantwatch.store.engines import BEGIN, postgres_engine, sqlite_engine
from quantwatch.store.failures import clear_errors
from quantwatch.store.schema import SchemaState, require_current, state_of
from quantwatch.store.session import open_database
from quantwatch.store.tables import Base
from quantwatch.store.urls import SqliteFile, is_own, parse_url, shown

WAIT_S = 60.0
"""How long another process's upgrade is waited for."""
_ADVISORY_LOCK = 0x7175616E74  # "quant": any number, the same in every process


def schema_state(url: str) -> SchemaState:
    """Return whether the schema is current, behind, ahead, or not there at all."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not SqliteFile.of(parsed).path.exists():
        return "empty"
    database = open_database(url, read_only=True, check_schema=False)
    try:
        with database.reader() as session:
            return state_of(session.connection(), database.name)
    finally:
        database.close()


def upgrade(url: str, *, wait_s: float = WAIT_S) -> None:
    """Create or upgrade all tables in one transaction; creates a SQLite file that isn't there.

    Raises StoreError when the schema is ahead of this program, or another process takes too long.
    """
    name = shown(parse_url(url))
    state = schema_state(url)
    if state == "current":
        return
    if state == "ahead":
        require_current(state, name)
    migrate(url, "head", wait_s=wait_s)


def migrate(url: str, revision: str, *, wait_s: float = WAIT_S) -> None:
    """Run the migrations up to `revision`, or down to it for `base`, under the upgrade lock."""
    parsed = parse_url(url)
    name = shown(parsed)
    engine = _engine(url, wait_s)
    try:
        with (
            clear_errors(name),
            engine.connect().execution_options(**{BEGIN: "BEGIN IMMEDIATE"}) as connection,
            connection.begin(),
        ):
            _lock(connection)
            run = command.downgrade if revision == "base" else command.upgrade
            run(alembic_config(connection), revision)
            _check_foreign_keys(connection, name)
    finally:
        engine.dispose()


def schema_drift(url: str) -> tuple[str, ...]:
    """Return how a migrated database differs from the tables in Python, in words; () if nowhere.

    Compared are tables, columns, types, indexes, unique and foreign keys (Alembic's autogenerate).
    """
    database = open_database(url, read_only=True, check_schema=False)
    try:
        with database.reader() as session:
            context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
            found = compare_metadata(context, Base.metadata)
    finally:
        database.close()
    # All changes of one column come as one list.
    changes = (each for entry in found for each in (entry if isinstance(entry, list) else [entry]))
    return tuple(_in_words(*change) for change in changes)


def alembic_config(connection: Connection) -> Config:
    """Return Alembic's configuration for an open connection, which env.py finds in `attributes`."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def migrations_folder() -> Path:
    """Return the migrations: beside the code in a wheel, in the source tree otherwise."""
    package = Path(quantwatch.__file__).parent
    for folder in (package / "_migrations", package.parents[1] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise StoreError(f"The migrations are missing from {package}; install quantwatch again.")


def _in_words(change: str, *what: Any) -> str:
    """Describe one of autogenerate's differences: add_table, remove_column, modify_type, …"""
    action, _, part = change.partition("_")
    if action == "modify":
        _, table, column, _, old, new = what
        return f"column {table}.{column}: {part} is {old} in the database, {new} in Python"
    place = "in Python only" if action == "add" else "in the database only"
    if part == "column":
        return f"column {what[1]}.{what[2].name} is {place}"
    table = "" if part == "table" else f" of table {what[0].table.name}"
    kind = "foreign key" if part == "fk" else part
    return f"{kind} {what[0].name}{table} is {place}"


def _engine(url: str, wait_s: float) -> Engine:
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        return postgres_engine(parsed, wait_s=wait_s)
    file = SqliteFile.of(parsed)
    if file.read_only:
        raise StoreError(f"Database {shown(parsed)} is opened read-only; it can't be upgraded.")
    _provide_folder(file.path.parent, shown(parsed))
    # Tables are rebuilt for most changes in SQLite, which enforced foreign keys forbid.
    return sqlite_engine(parsed, mode="rwc", wait_s=wait_s, foreign_keys=False)


def _provide_folder(folder: Path, name: str) -> None:
    """Create quantwatch's own data folder; any other folder is for the user to name rightly."""
    if folder.is_dir():
        return
    if not is_own(folder):
        raise NoDatabaseError(f"Database {name} can't be created: folder {folder} does not exist.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"Database {name} can't be created: {error}.") from error


def _lock(connection: Connection) -> None:
    """Let one process migrate at a time. SQLite's BEGIN IMMEDIATE has done so already."""
    if connection.dialect.name == "postgresql":
        # Held to the end of this transaction, in which the whole migration runs.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})


def _check_foreign_keys(connection: Connection, name: str) -> None:
    if connection.dialect.name != "sqlite":
        return
    broken = connection.execute(text("PRAGMA foreign_key_check")).first()
    if broken is not None:
        raise StoreError(
            f"Database {name}: row {broken[1]} of table {broken[0]} would refer to nothing after "
            "the migration; nothing was changed."
        )
