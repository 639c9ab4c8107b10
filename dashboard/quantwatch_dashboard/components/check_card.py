"""The first thing on a check's page: how it stands, since when, and when it runs next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

from quantwatch.domain import Verdict
from quantwatch.store.states import CheckState
from quantwatch_dashboard import text
from quantwatch_dashboard.components import hero
from quantwatch_dashboard.components.checks import chips, open_alerts
from quantwatch_dashboard.components.markup import Html, join, run_link, tag
from quantwatch_dashboard.components.run_list import changed_words
from quantwatch_dashboard.components.schedule import next_run, next_runs, words
from quantwatch_dashboard.components.verdict import badge, tone
from quantwatch_dashboard.components.words import moment, times
from quantwatch_dashboard.logic import standings
from quantwatch_dashboard.logic.history import Change
from quantwatch_dashboard.logic.summaries import CheckSummary

_MOST_CHANGES = 4
_KINDS = {"rolling": "the mean of the last good runs", "best-ever": "the best run so far"}


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a check besides its summary. `began` is None when it can't be told."""

    fault: str = ""
    silenced: int = 0
    began: tuple[Change, ...] | None = None


def card(check: CheckSummary, known: Known, now: datetime, zone: tzinfo) -> Html:
    """Return the card with verdict, what is the matter, and the check's facts."""
    run = check.decided or check.newest
    verdict = check.decided.verdict if check.decided is not None else None
    shown = tag("span", "No verdict") if run is None else badge(run.status, run.verdict)
    since = [" since ", moment(check.since, now, zone)] if check.since is not None else []
    body = (
        tag("div", headline(check, known.fault), class_="qw-what"),
        tag("div", *_sentences(check, known, now), class_="qw-words"),
        chips(check),
    )
    head = shown, tag("span", *since, class_="qw-soft")
    return hero.card(head, body, _facts(check, known.silenced, now, zone), tone(verdict))


def headline(check: CheckSummary, fault: str) -> str:
    """Say how a check stands in a few words."""
    if check.decided is None:
        return "No run has succeeded yet" if check.newest is not None else "It has not run yet"
    at = standings.lead(check)
    name = check.candidates[at] if at is not None else ""
    verdict = check.decided.verdict
    if verdict is Verdict.REGRESSION:
        return fault or f"{name} is worse than its rules allow"
    if verdict is Verdict.WARN:
        return f"{name} breaches a rule that warns"
    if verdict is Verdict.INCONCLUSIVE:
        return f"Too few tokens to decide about {name}"
    if verdict is Verdict.IMPROVEMENT:
        return f"{name} is better than its baseline"
    return "Every candidate stays within its rules"


def _sentences(check: CheckSummary, known: Known, now: datetime) -> Iterator[Html]:
    at = standings.lead(check)
    if at is not None:
        yield _measured(check, at)
    verdict = check.decided.verdict if check.decided is not None else None
    if known.began is not None and verdict not in (None, Verdict.PASS):
        yield tag("p", *_began(known.began))
    if (run := check.unfinished) is not None:
        reason = text.clip(run.reason or "no reason was recorded", 200)
        said = f"⚡ Its newest run {run.status.value} {text.age(run.started_at, now)}: {reason}"
        yield tag("p", tag("span", said, class_="qw-trouble"))
    if (pause := check.state.pause) is not None:
        by = f" by {pause.by}" if pause.by else ""
        why = pause.reason or "no reason was given"
        yield tag("p", f"Paused {text.age(pause.at, now)}{by}: {why}")


def _measured(check: CheckSummary, at: int) -> Html:
    """Say what the candidate that matters measures in the decided run, and against what."""
    name, value = check.candidates[at], standings.value_now(check, at)
    if value is None:
        return tag("p", f"Output KL of {name}: not measured in the newest run with results.")
    found = standings.against(check, at)
    if check.not_comparable:
        against = f"; {check.not_comparable}"
    elif check.is_baseline:
        against = "; this run is the baseline itself"
    elif found is None:
        against = "; nothing to compare it with"
    else:
        against = f", {times(found[0])} {check.compared_with} of {text.number(found[1].baseline)}"
    shown = tag("b", text.number(value))
    return tag("p", f"Output KL of {name}: ", shown, f" nats{against}.")


def _began(changes: Sequence[Change]) -> Iterator[object]:
    """Say what changed in the run where it began: the first thing that is asked."""
    told = [changed_words(change, record) for change in changes for record in change.records]
    if not told:
        yield (
            "In the run where it began, nothing changed that is recorded: the same weights, "
            "recipe, reference, libraries and driver as before."
        )
        return
    yield "In the run where it began, something changed: "
    for i, said in enumerate(told[:_MOST_CHANGES]):
        yield join(["; " if i else "", said])
    if more := text.more(len(told), _MOST_CHANGES):
        yield f"; {more}"
    yield "."


def _facts(
    check: CheckSummary, silenced: int, now: datetime, zone: tzinfo
) -> Iterator[tuple[str, object]]:
    state = check.state
    yield "next run", next_run(state, now, zone)
    if state.timetable is not None and state.pause is None:
        later = [text.minute(at, zone) for at in next_runs(state.timetable, now)]
        yield "then", ", ".join(later[1:]) or text.NONE
    elif state.timetable is not None:
        yield "schedule", words(state.timetable.settings)
    yield "open alerts", open_alerts(check, silenced)
    last = check.last_success
    yield "last success", "never" if last is None else moment(last, now, zone)
    yield "baseline", baseline(state)
    suite = check.decided.suite_name if check.decided is not None else state.config.get("suite")
    yield "suite", str(suite or text.NONE)
    if state.unhealthy_runs:
        yield "no result", f"{text.plural(state.unhealthy_runs, 'run')} in a row"


def baseline(state: CheckState) -> object:
    """Return what the check's runs are compared with, and a link to it."""
    kind = (state.config.get("baseline") or {}).get("kind", "pinned")
    if state.baseline_run_id is None:
        return "none is pinned" if kind == "pinned" else f"none yet: {_KINDS.get(kind, kind)}"
    said = "pinned run " if kind == "pinned" else f"{_KINDS.get(kind, kind)}, last "
    return join([said, run_link(state.baseline_run_id)])
