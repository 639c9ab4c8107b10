"""`quantwatch schedule`: when checks run next, and pausing them."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantwatch.cli import options as o
from quantwatch.cli.actor import who
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say
from quantwatch.errors import UserError

if TYPE_CHECKING:
    from quantwatch.scheduler.upcoming import Stored

app = typer.Typer(help="When checks run next, and pausing them.", no_args_is_help=True)
Reason = Annotated[str, typer.Option(help="Why; shown to everybody and kept.")]


@app.command("list")
def list_(context: typer.Context, json: o.AsJson = False) -> None:
    """List schedules with their next three instants, also before the service has ever run."""
    rows = _rows(Session.of(context, json=json))
    if json:
        show_json(rows)
        return
    lines = [
        [row["check"], row["schedule"], row["zone"] or "–", row["state"], *_next(row)]
        for row in rows
    ]
    show(table(["check", "schedule", "zone", "state", "next", "next (UTC)"], lines))


@app.command("show")
def show_(context: typer.Context, check: o.Check, json: o.AsJson = False) -> None:
    """Show a check's schedule: its limits, how it stands, its next three instants."""
    rows = {row["check"]: row for row in _rows(Session.of(context, json=json))}
    if check not in rows:
        known = ", ".join(rows) or "none"
        raise UserError(f"check {check!r} has no schedule; checks with one: {known}")
    if json:
        show_json(rows[check])
        return
    local, utc = _next(rows[check])
    facts = rows[check] | {"next": local, "next (UTC)": utc}
    show(table(["", ""], [[key, "–" if facts[key] is None else str(facts[key])] for key in facts]))


@app.command("pause")
def pause(context: typer.Context, check: o.Check, reason: Reason) -> None:
    """Pause a check: its slots are recorded as skipped until it is resumed."""
    from quantwatch.store import checks

    session = Session.of(context)
    with session.writer() as database:
        with database.reader() as reading:
            _require_known(session, check, checks.known_checks(reading))
        done = checks.pause(database, check, who(), reason)
    say(f"{check}: {'paused' if done else 'was paused already'}\n")


@app.command("resume")
def resume(context: typer.Context, check: o.Check) -> None:
    """Let a paused check run again, from its next slot on."""
    from quantwatch.store import checks

    session = Session.of(context)
    with session.writer() as database:
        with database.reader() as reading:
            _require_known(session, check, checks.known_checks(reading))
        done = checks.resume(database, check, who())
    say(f"{check}: {'resumed' if done else 'was not paused'}\n")


def _rows(session: Session) -> list[dict[str, Any]]:
    """Return the schedules of the file and of the database."""
    from quantwatch.scheduler.upcoming import upcoming

    checks = session.config()[0].checks if session.find_config() else {}
    sections = {name: check.schedule for name, check in checks.items() if check.schedule}
    return upcoming(sections, _stored(session))


def _stored(session: Session) -> "Stored":
    """Return what the database knows; none is created, and none is needed."""
    from quantwatch.scheduler.upcoming import Stored
    from quantwatch.store import checks, clock, schedules
    from quantwatch.store.upgrade import schema_state

    if schema_state(session.database_url()) == "empty":
        return Stored(datetime.now(UTC), {}, {})
    with session.reader() as database, database.reader() as reading:
        states, pauses = schedules.states_by_check(reading), checks.pauses(reading)
        return Stored(clock.now(reading), states, pauses)


def _next(row: dict[str, Any]) -> tuple[str, str]:
    """Return the next instants in the check's zone and in UTC, one a line."""
    local, utc = ("\n".join(at[key] for at in row["next"]) or "–" for key in ("local", "utc"))
    return local, utc


def _require_known(session: Session, check: str, stored: list[str]) -> None:
    in_file = session.config()[0].checks if session.find_config() else {}
    if check not in stored and check not in in_file:
        known = ", ".join(sorted({*stored, *in_file})) or "none"
        raise UserError(f"no check {check!r} in the file or the database; there are: {known}")
