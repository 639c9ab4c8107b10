"""`quantwatch deliveries`: what was told, what waits, what is a dead letter."""

from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantwatch.cli import options as o
from quantwatch.cli.actor import who
from quantwatch.cli.output import show, show_json, table
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say
from quantwatch.errors import UserError

if TYPE_CHECKING:
    from quantwatch.store.dead_letters import Delivery

app = typer.Typer(help="Messages to endpoints.", no_args_is_help=True)


class By(StrEnum):
    """What failed operations are counted by."""

    OPERATION = "operation"
    ERROR = "error"


State = Annotated[str | None, typer.Option(help="Only these: pending, delivered, dead, …")]
Count = Annotated[int, typer.Option(min=1, help="At most so many, newest first.")]
EventId = Annotated[str | None, typer.Argument(metavar="[EVENT]", help="Id of the event.")]
Dead = Annotated[bool, typer.Option("--dead", help="All dead letters; needs --since.")]
Since = Annotated[
    str | None, typer.Option(help="With --dead: 24h ago, or since 2026-11-29T02:00Z.")
]
Again = Annotated[bool, typer.Option("--again", help="Also where it was delivered already.")]


@app.command("list")
def list_(
    context: typer.Context, state: State = None, limit: Count = 50, json: o.AsJson = False
) -> None:
    """List messages, newest first, with what came of them."""
    from quantwatch.store.dead_letters import list_deliveries

    with Session.of(context, json=json).reader() as database:
        rows = [_row(one) for one in list_deliveries(database, state=state, limit=limit)]
    if json:
        show_json(rows)
    else:
        show(table(list(_SHOWN), [[str(row[name] or "–") for name in _SHOWN] for row in rows]))


@app.command("replay")
def replay(
    context: typer.Context,
    event: EventId = None,
    dead: Dead = False,
    since: Since = None,
    again: Again = False,
) -> None:
    """Tell an event, or all dead letters, again: same id, same body, new signature."""
    from quantwatch.report.numbers import plural
    from quantwatch.store import replays

    _check(event, dead, since, again)
    with Session.of(context).writer() as database:
        if event is not None:
            count, over = replays.replay(database, event, who(), again=again), 0
        else:
            found = replays.replay_dead(database, start_of(str(since)), who())
            count, over = found.waiting, found.over
    ended = f", {over} {'is' if over == 1 else 'are'} over" if over else ""
    say(f"{plural(count, 'delivery waits', 'deliveries wait')} again{ended}\n")


@app.command("failed")
def failed(
    context: typer.Context,
    by: Annotated[By, typer.Option(help="Count by operation or by error.")] = By.OPERATION,
    json: o.AsJson = False,
) -> None:
    """Count every operation that failed, with attempts, first and last time."""
    from dataclasses import asdict

    from quantwatch.store.failed_tasks import count_by

    with Session.of(context, json=json).reader() as database:
        rows = [_plain(asdict(one)) for one in count_by(database, by.value)]
    if json:
        show_json(rows)
    else:
        names = ["name", "num_tasks", "num_open", "num_attempts", "first_at", "last_at"]
        show(table([by.value, *names[1:]], [[str(row[name]) for name in names] for row in rows]))


def start_of(text: str) -> datetime | timedelta:
    """Read --since: a length of time before now, or an instant with its zone.

    Raises UserError on anything else.
    """
    from quantwatch.config.durations import seconds

    try:
        return timedelta(seconds=seconds(text))
    except ValueError:
        pass  # Then it is an instant.
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise UserError(f"--since {text!r}; allowed: 24h, 3d, 2026-11-29T02:00Z (with a zone)")
    return moment


def _check(event: str | None, dead: bool, since: str | None, again: bool) -> None:
    if (event is None) != dead:
        raise UserError("replay needs the id of an event, or --dead with --since")
    if dead and since is None:
        raise UserError("--dead needs --since, e.g. --since 24h")
    if dead and again:
        raise UserError("--again needs the id of an event: what was delivered is told again singly")


_SHOWN = ("event", "type", "endpoint", "state", "attempt", "next_at", "status", "seconds", "error")


def _row(one: "Delivery") -> dict[str, Any]:
    waits = one.ended_at is None
    return {
        "event": one.event_id,
        "type": one.type,
        "endpoint": one.endpoint,
        "subject": one.subject,
        "state": one.state,
        "attempt": one.attempt,
        "created_at": one.created_at.isoformat(timespec="seconds"),
        "next_at": one.next_at.isoformat(timespec="seconds") if waits else None,
        "ended_at": one.ended_at.isoformat(timespec="seconds") if one.ended_at else None,
        "status": one.last_status,
        "seconds": None if one.duration_s is None else round(one.duration_s, 3),
        "error": one.last_error,
    }


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.isoformat(timespec="seconds") if isinstance(value, datetime) else value
        for name, value in row.items()
    }
