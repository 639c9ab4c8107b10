"""`quantwatch cache`: the recorded references on this machine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantwatch.cli import options as o
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session, cache_dir
from quantwatch.cli.streams import say, whisper

if TYPE_CHECKING:
    from quantwatch.capture.stored.shelf import Entry, Shelf

app = typer.Typer(help="Recorded references.", no_args_is_help=True)
Keys = Annotated[
    list[str] | None, typer.Argument(help="Starts of keys, as `list` shows them; all when absent.")
]
_COLUMNS = ("key", "reference", "suite", "tokens", "MB", "kB per token", "recorded", "uses")


@app.command("list")
def list_(context: typer.Context, json: o.AsJson = False) -> None:
    """List recorded references, the one that goes first on top."""
    session = Session.of(context, json=json)
    shelf = _shelf(session)
    rows = [described(entry) for entry in shelf.entries()]
    if json:
        show_json({"limit_bytes": shelf.limit_bytes, "entries": rows})
        return
    show(table(list(_COLUMNS), [_texts(row) for row in rows]))
    taken = sum(row["num_bytes"] for row in rows)
    say(f"{taken / 1e9:,.1f} of {shelf.limit_bytes / 1e9:,.0f} GB in {shelf.folder}\n")


@app.command("clear")
def clear(context: typer.Context, keys: Keys = None) -> None:
    """Remove recorded references; those a run reads or writes right now stay."""
    shelf = _shelf(Session.of(context))
    for entry in chosen(shelf, keys):
        if shelf.remove(entry.key):
            say(f"removed {entry.key[:12]}, {entry.num_bytes / 1e6:,.0f} MB\n")
        else:
            whisper(f"note: {entry.key[:12]} is in use and stays")


def chosen(shelf: "Shelf", keys: list[str] | None) -> "list[Entry]":
    """Return the entries whose keys start so. Raises UserError for a start that none has."""
    from quantwatch.errors import UserError

    entries = shelf.entries()
    if not keys:
        return entries
    for key in keys:
        if not key or not any(entry.key.startswith(key) for entry in entries):
            known = ", ".join(entry.key[:12] for entry in entries) or "none"
            raise UserError(f"no recorded reference {key!r}; there are: {known}")
    return [entry for entry in entries if entry.key.startswith(tuple(keys))]


def described(entry: "Entry") -> dict[str, Any]:
    """Return an entry as plain data; one that can't be read says so."""
    from quantwatch.capture.stored.damage import DamagedError

    row: dict[str, Any] = {"key": entry.key, "num_bytes": entry.num_bytes, "uses": entry.uses}
    try:
        return {**row, "damage": None, **entry.manifest().about}
    except DamagedError as error:
        return {**row, "damage": str(error)}


def _texts(row: dict[str, Any]) -> list[str]:
    tokens = row.get("num_tokens")
    each = "–" if not tokens else f"{row['num_bytes'] / tokens / 1e3:,.0f}"
    name = f"{row['reference']} ({row['dtype']})" if tokens else f"damaged: {row['damage']}"
    mb, said = f"{row['num_bytes'] / 1e6:,.0f}", row.get("recorded_at", "–")
    return [row["key"][:12], name, row.get("suite", "–"), str(tokens or "–"), mb, each, said,
            str(row["uses"])]  # fmt: skip


def _shelf(session: Session) -> "Shelf":
    from quantwatch.capture.stored.shelf import Shelf

    return Shelf(cache_dir() / "reference", session.cache().reference_bytes)
