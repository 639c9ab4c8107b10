"""A run that is asked for and carried out by the service: queued once, waited for if wanted."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from quantwatch.cli.actor import actor
from quantwatch.cli.output import Delivery, show_json
from quantwatch.cli.session import Session
from quantwatch.cli.streams import say, whisper
from quantwatch.errors import UserError

if TYPE_CHECKING:
    from quantwatch.config.schema import CheckConfig

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """How a run is asked for. Raises UserError when the options contradict each other."""

    queue: bool
    key: str | None
    wait: bool
    json: bool
    here: bool
    """Something was said that only a run in this process can heed."""
    shown: bool
    """A report is wanted."""

    def __post_init__(self) -> None:
        if not self.queue and (self.wait or self.key is not None):
            raise UserError("--key and --wait belong to --queue; without it a run starts here")
        if self.queue and self.here:
            raise UserError("--baseline, --store and --yes are for a run here, not for --queue")
        if self.queue and self.shown and not self.wait:
            raise UserError("--format and --output need --wait: a queued run has no result yet")


def queue(session: Session, name: str, check: "CheckConfig", folder: Path, order: Order) -> str:
    """Queue a run of a check, print its id unless it is waited for, and return it."""
    from quantwatch.store.queue import NewRun
    from quantwatch.store.triggers import trigger

    wanted = NewRun.of(name, check, str(folder), slot_key="")
    with session.writer() as database:
        triggered = trigger(database, wanted, actor=actor(), key=order.key)
    if not triggered.is_new:
        whisper("note: this key has queued that run before")
    if order.wait:
        whisper(f"queued: {triggered.run_id}")
    elif order.json:
        show_json({"run_id": triggered.run_id, "is_new": triggered.is_new})
    else:
        say(f"{triggered.run_id}\n")
    return triggered.run_id


def wait(session: Session, run_id: str, delivery: Delivery) -> NoReturn:
    """Wait until a run has ended, deliver its result, and exit with its code."""
    from quantwatch.alerts.exit_codes import exit_code
    from quantwatch.store.runs import get_result
    from quantwatch.store.summaries import get_summary

    shown = ""
    with session.reader() as database:
        while (run := get_summary(database, run_id)) is not None and not run.status.is_ended:
            if shown != run.status:
                shown = run.status
                whisper(f"{run_id}: {shown}")
            threading.Event().wait(_LOOK_S)
        result = get_result(database, run_id)
    delivery.deliver(result)
    raise typer.Exit(exit_code(result))
