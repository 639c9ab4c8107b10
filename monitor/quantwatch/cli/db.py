"""`quantwatch db`: the database's schema, its backup, its size, and what is kept."""

from pathlib import Path
from typing import Annotated

import typer

from quantwatch.cli import retention
from quantwatch.cli.session import Session, shown
from quantwatch.cli.streams import say, whisper
from quantwatch.errors import StoreError

app = typer.Typer(help="The database.", no_args_is_help=True)
app.command("prune")(retention.prune)
app.command("sizes")(retention.sizes)


@app.command("upgrade")
def upgrade(context: typer.Context) -> None:
    """Create the database, or bring its schema to this program's version."""
    from quantwatch.store.upgrade import upgrade as store_upgrade

    url = Session.of(context).database_url()
    store_upgrade(url)
    say(f"{shown(url)}: schema is current\n")


@app.command("check")
def check(context: typer.Context) -> None:
    """Say whether the schema fits this program, table by table; exits with 3 when it doesn't."""
    from quantwatch.store.upgrade import schema_drift, schema_state

    session = Session.of(context)
    url = session.database_url()
    state = schema_state(url)
    if state != "current":
        raise StoreError(f"{shown(url)}: schema is {state}; {remedy(state, session)}")
    if drift := schema_drift(url):
        raise StoreError(f"{shown(url)}: schema was changed by hand: {'; '.join(drift)}")
    say(f"{shown(url)}: schema is current\n")


@app.command("backup")
def backup(
    context: typer.Context, target: Annotated[Path, typer.Argument(help="File to write.")]
) -> None:
    """Copy the database while it is in use."""
    from quantwatch.store.backup import backup as store_backup

    url = Session.of(context).database_url()
    store_backup(url, target)
    say(f"wrote {target}: backup of {shown(url)}\n")


@app.command("restore")
def restore(
    context: typer.Context, source: Annotated[Path, typer.Argument(help="File of `db backup`.")]
) -> None:
    """Fill a new or empty database from a backup; nothing is overwritten."""
    from quantwatch.store.restore import restore as store_restore

    session = Session.of(context)
    url = session.database_url()
    state = store_restore(url, source)
    say(f"{shown(url)}: restored from {source}\n")
    if state != "current":
        whisper(f"note: its schema is {state}; {remedy(state, session)}")


def remedy(state: str, session: Session) -> str:
    """Return what to do about a schema that isn't current."""
    if state == "ahead":
        return "a newer quantwatch wrote it: update this one"
    return f"run: {session.program} db upgrade"
