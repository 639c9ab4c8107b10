"""How the checks stand, in words, and which of them a reader wants to see. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from quantwatch.config.durations import seconds
from quantwatch.domain import Verdict
from quantwatch.store.timetables import Timetable
from quantwatch_dashboard.logic.bands import Band
from quantwatch_dashboard.logic.ranking import rank
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.text import ANY

NO_VERDICT = "none"
VERDICTS = (ANY, *(verdict.value for verdict in Verdict), NO_VERDICT)
_SOME_MINUTES = timedelta(minutes=5)
_NEVER, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader asked for: every part must fit."""

    search: str = ""
    verdict: str = ANY
    state: str = ANY
    tag: str = ANY
    sort: str = "worst"


def verdict_of(check: CheckSummary) -> str:
    """Return the verdict of the newest succeeded run, `none` without one."""
    verdict = check.decided.verdict if check.decided is not None else None
    return NO_VERDICT if verdict is None else verdict.value


def is_late(timetable: Timetable, now: datetime) -> bool:
    """Say whether the next slot should have begun: after its jitter, and some minutes more."""
    due = timetable.next_slot_at
    if due is None:
        return False
    try:
        jitter = seconds(str(timetable.settings.get("jitter") or "0s"))
    except ValueError:
        jitter = 0
    return due + timedelta(seconds=jitter) + _SOME_MINUTES < now


def is_overdue(check: CheckSummary, now: datetime) -> bool:
    """Say whether the next run should have begun: nobody schedules, or nobody measures."""
    state = check.state
    waits = state.pause is None and state.quarantined_at is None and not state.unended
    return waits and state.timetable is not None and is_late(state.timetable, now)


STATES: Mapping[str, tuple[str, Callable[[CheckSummary, datetime], bool]]] = {
    ANY: ("all states", lambda _, __: True),
    "alerts": ("alerts fire", lambda check, _: check.state.alerts.firing > 0),
    "trouble": (
        "no result",
        lambda check, _: check.trouble is not None or check.state.quarantined_at is not None,
    ),
    "running": (
        "running",
        lambda check, _: check.under_way is not None or check.num_waiting > 0,
    ),
    "paused": ("paused", lambda check, _: check.state.pause is not None),
    "overdue": ("overdue", is_overdue),
}
"""What may hold of a check besides its verdict → how it is called, and what passes it."""


def tags_of(found: Sequence[CheckSummary]) -> tuple[str, ...]:
    """Return all tags, each once."""
    return tuple(sorted({tag for check in found for tag in check.tags}))


def matching(
    found: Sequence[CheckSummary], wanted: Wanted, now: datetime
) -> tuple[CheckSummary, ...]:
    """Return the checks that fit, in the order that was asked for; `found` is worst first.

    Those that are no longer configured come last.
    """
    words = wanted.search.casefold().split()
    fits = [
        check
        for check in found
        if all(word in _searched(check) for word in words)
        and wanted.verdict in (ANY, verdict_of(check))
        and (wanted.tag == ANY or wanted.tag in check.tags)
        and STATES[wanted.state][1](check, now)
    ]
    key = SORTS[wanted.sort][1]
    return tuple(sorted(fits, key=lambda c: (not c.state.in_use, key(c))))


def in_use(found: Sequence[CheckSummary]) -> tuple[CheckSummary, ...]:
    """Return the checks that are still configured: only these can be worse or better *now*."""
    return tuple(check for check in found if check.state.in_use)


def counted(found: Sequence[CheckSummary]) -> Mapping[str, int]:
    """Return how many of the configured checks have each verdict, of `VERDICTS`."""
    given = [verdict_of(check) for check in in_use(found)]
    return {name: len(given) if name == ANY else given.count(name) for name in VERDICTS}


def lead(check: CheckSummary) -> int | None:
    """Return the place of the candidate that matters, as on the run's own page."""
    return next(iter(ranked(check)), None)


def ranked(check: CheckSummary) -> tuple[int, ...]:
    """Return the places of the decided run's candidates, the one that matters first."""
    found = () if check.decided is None else check.decided.candidates
    return tuple(sorted(range(len(found)), key=lambda i: rank(found[i][1], value_now(check, i))))


def value_now(check: CheckSummary, index: int) -> float | None:
    """Return a candidate's headline in the decided run, None when that did not measure it.

    NaN and infinities are returned as they are.
    """
    return check.now[index] if index < len(check.now) else None


def against(check: CheckSummary, index: int) -> tuple[float, Band] | None:
    """Return a candidate's headline now ÷ its baseline, and that; None when one is missing or 0,
    or the run is the baseline itself.
    """
    band = check.bands[index] if index < len(check.bands) else None
    value = value_now(check, index)
    if band is None or value is None or band.baseline <= 0 or check.is_baseline:
        return None
    return math.inf if not math.isfinite(value) else value / band.baseline, band


def ratio(check: CheckSummary, index: int) -> float | None:
    """Return how many times as large as its baseline a candidate's headline is now."""
    found = against(check, index)
    return None if found is None else found[0]


def _searched(check: CheckSummary) -> str:
    description = str(check.state.config.get("description") or "")
    return " ".join((check.check, description, *check.candidates, *check.tags)).casefold()


def _change(check: CheckSummary) -> float:
    # Of any candidate: the one that matters may be coarse, and stay as it was.
    changes = (ratio(check, i) or 0.0 for i in range(len(check.candidates)))
    return max(changes, default=0.0)


def _next(check: CheckSummary) -> datetime:
    timetable = check.state.timetable
    due = timetable.next_slot_at if timetable is not None and check.state.pause is None else None
    return due or _LAST


SORTS: Mapping[str, tuple[str, Callable[[CheckSummary], tuple[object, ...]]]] = {
    "worst": ("worst first", lambda c: c.order),
    "change": ("largest change", lambda c: (-_change(c), c.check)),
    "since": (
        "newest verdict",
        lambda c: (math.inf if c.since is None else -c.since.timestamp(), c.check),
    ),
    "next": ("next run", lambda c: (_next(c), c.check)),
    "success": ("oldest success", lambda c: (c.last_success or _NEVER, c.check)),
    "name": ("name", lambda c: (c.check,)),
}
"""How checks are ordered → how that is called, and the key."""
