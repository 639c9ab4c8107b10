"""How the service does, in words, from its records. Pure: no clock, no database."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from quantwatch.domain import RunStatus
from quantwatch.store.components import Seen
from quantwatch.store.disk import Room, Space
from quantwatch.store.leader import Leader
from quantwatch.store.states import UnendedRun
from quantwatch.store.suppression import OPEN
from quantwatch_dashboard import text

SILENT_S = 90.0
"""A part that is well is seen at least twice in this time; `/readyz` has the same limit."""
_OLD_DELIVERY = timedelta(minutes=15)
_ROOM = {
    Room.ENOUGH: "",
    Room.LITTLE: "; matrices per token are not kept",
    Room.NONE: "; nothing is measured any more",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure at the top of a page: ``Queue``, ``2 wait``, ``oldest 5 min ago``.

    `bad` is what somebody has to look at.
    """

    name: str
    value: str
    detail: str
    bad: bool = False


def headline(
    parts: Sequence[Seen],
    found: Leader | None,
    silence_s: float | None,
    figures: Iterable[Figure],
) -> str:
    """Say the worst."""
    if not parts and silence_s is None:
        stopped = _stopped(found, silence_s)
        return "No service has been seen" if stopped is None else f"The service {stopped}"
    if silence_s is None or silence_s > SILENT_S:
        return "The scheduler is silent"
    bad = [figure.name.casefold() for figure in figures if figure.bad]
    return f"The service runs; needs attention: {', '.join(bad)}" if bad else "The service runs"


def scheduler(found: Leader | None, silence_s: float | None) -> Figure:
    """Say who schedules and when it looked last."""
    if found is None:
        return Figure("Scheduler", "none", "nobody has ever scheduled here", bad=True)
    if (stopped := _stopped(found, silence_s)) is not None:
        return Figure("Scheduler", stopped, f"{found.holder} gave its lease back", bad=True)
    looked = "never looked" if silence_s is None else f"looked {text.passed(silence_s)} ago"
    holds = found.left > timedelta()
    bad = silence_s is None or silence_s > SILENT_S or not holds
    lease = f"; its lease lasts {text.passed(found.left.total_seconds())}"
    lease = lease if holds else "; its lease has run out"
    return Figure("Scheduler", looked, f"{found.holder}{lease}", bad)


def _stopped(found: Leader | None, silence_s: float | None) -> str | None:
    """Say when the last scheduler ended cleanly, None when none did.

    Who ends cleanly leaves the list of parts and gives its lease back; who is killed stays on it.
    """
    if found is None or silence_s is not None or found.left > timedelta():
        return None
    return f"stopped {text.passed(-found.left.total_seconds())} ago"


def workers(parts: Sequence[Seen]) -> Figure:
    """Say how many workers there are, how many have something to do, and which parts are silent."""
    alive = [part for part in parts if not is_silent(part)]
    own = [part for part in alive if part.component.kind == "worker"]
    # Who was killed stays on the list for a day; what matters is whether another one took over.
    silent = {part.component.kind for part in parts} - {part.component.kind for part in alive}
    busy = sum(bool(part.details.get("run")) for part in own)
    words = [f"{busy} measuring"] if own else ["no worker has been seen lately"]
    words += [f"{kind} silent" for kind in sorted(silent - {"worker"})]
    return Figure("Workers", str(len(own)), ", ".join(words), bad=not own or bool(silent))


def queue(runs: Sequence[UnendedRun], now: datetime) -> Figure:
    """Say how many runs wait and for how long."""
    waiting = [run for run in runs if run.status is RunStatus.QUEUED]
    active = len(runs) - len(waiting)
    if not waiting:
        return Figure("Queue", "0 wait", f"{active} under way")
    oldest = min(run.queued_at or run.started_at for run in waiting)
    detail = f"oldest {text.age(oldest, now)}; {active} under way"
    return Figure("Queue", f"{len(waiting)} wait", detail)


def deliveries(counts: dict[str, int], oldest: datetime | None, now: datetime) -> Figure:
    """Say what is still to be delivered, and what never was."""
    is_open, dead = sum(counts.get(state, 0) for state in OPEN), counts.get("dead", 0)
    late = oldest is not None and now - oldest > _OLD_DELIVERY
    told = f"oldest {text.age(oldest, now)}" if oldest is not None else "nothing waits"
    letters = text.plural(dead, "dead letter")
    return Figure("Deliveries", f"{is_open:,} open", f"{told}; {letters}", bad=late or dead > 0)


def room(total_bytes: int, disk: Space | None) -> Figure:
    """Say how large the database is and how much of its disk is free."""
    if disk is None:
        detail, bad = "the server does not tell how much room it has", False
    else:
        share = text.share(disk.free_ratio)
        detail = f"{text.size(disk.free)} free ({share}){_ROOM[disk.room]}"
        bad = disk.room is not Room.ENOUGH
    return Figure("Database", text.size(total_bytes), detail, bad)


def trouble(failed: int, quarantined: int, parts: Iterable[Seen]) -> Figure:
    """Say what failed and is still open, and whether the configuration can't be applied."""
    broken = any(part.details.get("config_trouble") for part in parts if not is_silent(part))
    detail = f"{text.plural(quarantined, 'check')} in quarantine"
    detail += "; the configuration is broken" if broken else ""
    bad = failed > 0 or quarantined > 0 or broken
    return Figure("Failed tasks", f"{failed:,} open", detail, bad)


def is_silent(part: Seen) -> bool:
    """Say whether a part has not been seen for too long."""
    return part.age.total_seconds() > SILENT_S
