"""The overview in a sentence: is it worse, since when, and what else is the matter. Pure.

All of it is about checks in use; a caller leaves the others out.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from quantwatch.domain import Verdict
from quantwatch_dashboard import text
from quantwatch_dashboard.logic.standings import is_overdue
from quantwatch_dashboard.logic.summaries import CheckSummary

_NAMED = 2
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def headline(found: Sequence[CheckSummary]) -> str:
    """Say the worst. Not all checks pass while the newest run of one has no result."""
    verdicts = _verdicts(found)
    regressions = verdicts.count(Verdict.REGRESSION)
    if regressions:
        return text.plural(regressions, "regression")
    if not found:
        return "No check is configured"
    if not verdicts:
        return "No check has a verdict yet"
    undecided, warned = verdicts.count(Verdict.INCONCLUSIVE), verdicts.count(Verdict.WARN)
    if undecided:
        return f"{undecided} inconclusive"
    if warned:
        return f"No regression, {warned} with warnings"
    silent = _num_unfinished(found) or len(verdicts) < len(found)
    return "No regression" if silent else "All checks pass"


def counts(found: Sequence[CheckSummary]) -> str:
    """Return how many checks there are, and how many have no result lately."""
    checks, unfinished = len(found), _num_unfinished(found)
    counted = text.plural(checks, "check")
    return f"{counted}, {unfinished} with no result lately" if unfinished else counted


def answer(found: Sequence[CheckSummary], faults: Mapping[str, str], now: datetime) -> str:
    """Answer "is it worse?": yes and where and since when, or no; then what hides an answer."""
    return " ".join((_worse(found, faults, now), *_doubts(found, now)))


def named(found: Sequence[CheckSummary]) -> tuple[CheckSummary, ...]:
    """Return the checks that the answer names: those that became worse last."""
    bad = [c for c in found if c.decided is not None and c.decided.verdict is Verdict.REGRESSION]
    bad.sort(key=lambda check: check.since or _LONG_AGO, reverse=True)
    return tuple(bad[:_NAMED])


def worst_verdict(found: Sequence[CheckSummary]) -> Verdict | None:
    """Return the worst verdict of all checks, None when there is none."""
    verdicts = _verdicts(found)
    return Verdict.worst(verdicts) if verdicts else None


def _worse(found: Sequence[CheckSummary], faults: Mapping[str, str], now: datetime) -> str:
    number = _verdicts(found).count(Verdict.REGRESSION)
    if not found:
        return "Nothing is watched: every check below was taken out of the configuration."
    if not number:
        measured = len(_verdicts(found))
        if not measured:
            return "Nothing is known yet: no run has succeeded."
        whole = (
            "None of the checks" if measured == len(found) else f"None of {measured} with a verdict"
        )
        return f"Not worse: {whole[0].lower()}{whole[1:]} breaches a rule that makes a regression."
    told = [_named(check, faults, now) for check in named(found)]
    more = text.more(number, len(told))
    return f"Worse: {'; '.join(told)}{f'; {more}' if more else ''}."


def _named(check: CheckSummary, faults: Mapping[str, str], now: datetime) -> str:
    age = text.age(check.since, now).removesuffix(" ago") if check.since is not None else ""
    where = faults.get(check.check, "")
    return f"{check.check}{f' since {age}' if age else ''}{f' ({where})' if where else ''}"


def _doubts(found: Sequence[CheckSummary], now: datetime) -> Iterator[str]:
    """Yield what keeps the answer from being the whole truth."""
    verdicts = _verdicts(found)
    told = (
        (verdicts.count(Verdict.INCONCLUSIVE), "inconclusive"),
        (verdicts.count(Verdict.WARN), "with a warning"),
        (sum(c.trouble is not None for c in found), "with no result from the newest run"),
        (sum(is_overdue(c, now) for c in found), "overdue"),
        (sum(c.state.pause is not None for c in found), "paused"),
    )
    shown = [f"{number} {words}" for number, words in told if number]
    if shown:
        yield f"Besides: {', '.join(shown)}."


def _verdicts(found: Sequence[CheckSummary]) -> list[Verdict]:
    runs = (check.decided for check in found if check.decided is not None)
    return [run.verdict for run in runs if run.verdict is not None]


def _num_unfinished(found: Sequence[CheckSummary]) -> int:
    return sum(check.trouble is not None for check in found)
