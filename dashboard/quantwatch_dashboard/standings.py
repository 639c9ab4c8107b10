"""How the checks stand, in words, and which of them a reader wants to see. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from quantwatch.config.durations import seconds
from quantwatch.domain import Verdict
from quantwatch.store.states import Timetable
from quantwatch_dashboard.summaries import CheckSummary

ANY = "any"
NO_VERDICT = "none"
VERDICTS = (ANY, *(verdict.value for verdict in Verdict), NO_VERDICT)
STATES = (ANY, "alerts", "trouble", "running", "paused", "overdue")
SORTS = ("worst", "change", "since", "next", "success", "name")
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


def states_of(check: CheckSummary, now: datetime) -> frozenset[str]:
    """Return what holds of a check besides its verdict, of `STATES`."""
    holds = {
        "alerts": check.state.alerts.firing > 0,
        "trouble": check.trouble is not None or check.state.quarantined_at is not None,
        "running": check.under_way is not None or check.num_waiting > 0,
        "paused": check.state.pause is not None,
        "overdue": is_overdue(check, now),
    }
    return frozenset(name for name, true in holds.items() if true)


def tags_of(found: Sequence[CheckSummary]) -> tuple[str, ...]:
    """Return all tags, each once."""
    return tuple(sorted({tag for check in found for tag in check.tags}))


def matching(
    found: Sequence[CheckSummary], wanted: Wanted, now: datetime
) -> tuple[CheckSummary, ...]:
    """Return the checks that fit, in the order that was asked for; `found` is worst first."""
    words = wanted.search.casefold().split()
    fits = [
        check
        for check in found
        if all(word in _searched(check) for word in words)
        and wanted.verdict in (ANY, verdict_of(check))
        and (wanted.tag == ANY or wanted.tag in check.tags)
        and (wanted.state == ANY or wanted.state in states_of(check, now))
    ]
    return tuple(sorted(fits, key=lambda check: _key(check, wanted.sort)))


def counted(found: Sequence[CheckSummary]) -> Mapping[str, int]:
    """Return how many checks have each verdict, of `VERDICTS`."""
    given = [verdict_of(check) for check in found]
    return {name: len(given) if name == ANY else given.count(name) for name in VERDICTS}


def lead(check: CheckSummary) -> int | None:
    """Return the place of the candidate that matters: worst verdict, then largest change."""
    run = check.decided
    if run is None or not run.candidates:
        return None
    order = list(Verdict)
    ranks = [
        len(order) if verdict is None else order.index(verdict) for _, verdict in run.candidates
    ]
    return min(range(len(ranks)), key=lambda i: (ranks[i], -(ratio(check, i) or 0.0)))


def newest_value(check: CheckSummary, index: int) -> float | None:
    """Return a candidate's newest headline that was measured; NaN and infinities as they are."""
    values = check.trends[index].values if index < len(check.trends) else ()
    return next((value for value in reversed(values) if value is not None), None)


def ratio(check: CheckSummary, index: int) -> float | None:
    """Return a candidate's newest headline ÷ its baseline, None when either is missing or 0."""
    band = check.bands[index] if index < len(check.bands) else None
    value = newest_value(check, index)
    if band is None or value is None or band.baseline <= 0:
        return None
    return math.inf if not math.isfinite(value) else value / band.baseline


def _searched(check: CheckSummary) -> str:
    description = str(check.state.config.get("description") or "")
    return " ".join((check.check, description, *check.candidates, *check.tags)).casefold()


def _key(check: CheckSummary, sort: str) -> tuple[object, ...]:
    at = lead(check)
    change = ratio(check, at) if at is not None else None
    timetable = check.state.timetable
    due = timetable.next_slot_at if timetable is not None and check.state.pause is None else None
    keys: dict[str, tuple[object, ...]] = {
        "change": (-(change or 0.0), check.check),
        "since": (-(check.since or _NEVER).timestamp() if check.since else math.inf, check.check),
        "next": (due or _LAST, check.check),
        "success": (check.state.last_success_at or _NEVER, check.check),
        "name": (check.check,),
    }
    return keys.get(sort, check.order)
