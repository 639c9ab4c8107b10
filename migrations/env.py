"""Alembic's entry point. The program hands in an open connection; `alembic` on a command line
opens the database named by QUANTWATCH_DATABASE_URL."""

import os
from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.types import TypeDecorator

from quantwatch.store.engines import BEGIN
from quantwatch.store.session import open_database
from quantwatch.store.tables import Base


def plain_type(kind: str, item: object, _context: Any) -> str | Literal[False]:
    """Write the database's type into a new migration: our column types may change later."""
    if kind == "type" and isinstance(item, TypeDecorator):
        return f"sa.{item.impl!r}"
    return False


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        # SQLite can't alter most things: Alembic rebuilds the table instead.
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
        render_item=plain_type,
    )
    with context.begin_transaction():
        context.run_migrations()


def run_from_command_line() -> None:
    url = os.environ.get("QUANTWATCH_DATABASE_URL")
    if not url:
        raise SystemExit("Set QUANTWATCH_DATABASE_URL to the database to compare or migrate.")
    database = open_database(url, check_schema=False)
    options = {BEGIN: "BEGIN IMMEDIATE"}
    with database.engine.connect().execution_options(**options) as connection, connection.begin():
        run(connection)
    database.close()


if context.is_offline_mode():
    raise SystemExit("Migrations need a database connection; --sql is not supported.")
if (given := context.config.attributes.get("connection")) is not None:
    run(given)
else:
    run_from_command_line()
