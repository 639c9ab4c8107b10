"""The overview's rows: one per check, and the list of recent runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, tzinfo

from quantwatch.domain import RunStatus
from quantwatch.store.records import RunSummary
from quantwatch_dashboard import text
from quantwatch_dashboard.charts.sparkline import sparkline
from quantwatch_dashboard.components.markup import Html, image, join, link, soft, table, tag
from quantwatch_dashboard.components.schedule import next_run
from quantwatch_dashboard.components.verdict import badge, candidate_badge
from quantwatch_dashboard.components.words import moment, swatch, times
from quantwatch_dashboard.logic import standings
from quantwatch_dashboard.logic.lines import Guide
from quantwatch_dashboard.logic.marks import TROUBLE
from quantwatch_dashboard.logic.summaries import CheckSummary

_HEADERS = (
    "Verdict", "Check", "Candidates", "Output KL over runs (log)", "Next run", "Open alerts",
    "Last success", "",
)  # fmt: skip
_MOST_CANDIDATES, _MOST_TAGS = 4, 5


@dataclass(frozen=True, slots=True)
class Beside:
    """What rows say besides the summaries: where a check broke, how many alerts are silenced."""

    now: datetime
    zone: tzinfo
    faults: Mapping[str, str] = field(default_factory=dict)
    silenced: Mapping[str, int] = field(default_factory=dict)


def check_table(checks: Iterable[CheckSummary], beside: Beside) -> Html:
    """Return one row per check in the given order."""
    rows = (_check_row(check, beside) for check in checks)
    return table(_HEADERS, rows, "qw-overview", cards=_HEADERS[4:7])


def _check_row(check: CheckSummary, beside: Beside) -> list[object]:
    run = check.decided or check.newest
    now, zone = beside.now, beside.zone
    opened = link("Open run →", "run", run=run.run_id) if run is not None else Html("")
    return [
        tag("td", _verdict(check), _since(check, now, zone)),
        tag("td", *_name(check, beside), class_="qw-name"),
        tag("td", _candidates(check)),
        tag("td", _trend(check), class_="qw-trend"),
        tag("td", next_run(check.state, now, zone)),
        tag("td", open_alerts(check, beside.silenced.get(check.check, 0))),
        tag("td", _success(check, now, zone)),
        tag("td", opened, class_="qw-n"),
    ]  # fmt: skip


def _verdict(check: CheckSummary) -> Html:
    run = check.decided or check.newest
    if run is not None:
        return badge(run.status, run.verdict)
    return tag("span", "No verdict", class_="qw-soft")


def _since(check: CheckSummary, now: datetime, zone: tzinfo) -> Html:
    if check.since is not None:
        return tag("span", "since ", moment(check.since, now, zone), class_="qw-sub")
    if check.newest is not None:
        return tag("span", "never succeeded", class_="qw-sub")
    waiting = "waits for its first run" if check.state.unended else "has not run yet"
    return tag("span", waiting, class_="qw-sub")


def _name(check: CheckSummary, beside: Beside) -> Iterable[Html]:
    yield link(check.check, "check", check=check.check)
    fault = beside.faults.get(check.check)
    if fault:
        yield tag("span", fault, class_="qw-sub qw-fault")
    yield chips(check)
    yield _trouble(check, beside.now)


def chips(check: CheckSummary) -> Html:
    """Return what holds of a check now (running, paused, …), then its tags."""
    state = check.state
    shown = []
    if (run := check.under_way) is not None:
        shown.append(tag("a", "▶ running", href=f"run?run={run.run_id}", class_="qw-chip qw-on"))
    elif check.num_waiting:
        shown.append(tag("span", "… waits for a worker", class_="qw-chip qw-on"))
    if state.pause is not None:
        by = f" by {state.pause.by}" if state.pause.by else ""
        why = f"Paused{by}: {state.pause.reason or 'no reason was given'}"
        shown.append(tag("span", "‖ paused", class_="qw-chip qw-off", title=why))
    if state.quarantined_at is not None:
        why = "It made workers fail again and again; an admin lets it run again."
        shown.append(tag("span", "⚡ in quarantine", class_="qw-chip qw-off", title=why))
    if not state.in_use:
        why = "It is no longer in the configuration; only its runs are left."
        shown.append(tag("span", "no longer configured", class_="qw-chip qw-off", title=why))
    shown += [tag("span", text.clip(one, 24), class_="qw-chip") for one in check.tags[:_MOST_TAGS]]
    if (more := len(check.tags) - _MOST_TAGS) > 0:
        shown.append(tag("span", f"+{more}", class_="qw-chip", title=", ".join(check.tags)))
    return tag("div", *shown, class_="qw-chips") if shown else Html("")


def _trouble(check: CheckSummary, now: datetime) -> Html:
    """Say that the newest run has no result: shown apart from the verdict."""
    run = check.unfinished
    if run is None:
        return Html("")
    reason = text.clip(run.reason or "no reason was recorded", 160)
    ended = f"newest run {run.status.value} {text.age(run.started_at, now)}: {reason}"
    cancelled = run.status == RunStatus.CANCELLED
    said = f"⚡ N{ended[1:]}" if cancelled else f"⚡ No result: {ended}"
    if check.state.unhealthy_runs > 1:
        said += f" (no result from {check.state.unhealthy_runs} runs in a row)"
    return tag("div", tag("span", said, class_="qw-trouble"))


def _candidates(check: CheckSummary) -> Html:
    run = check.decided or check.newest
    found = run.candidates if run is not None else ()
    if not found:
        names = [
            tag("span", name, class_="qw-cand") for name in check.candidates[:_MOST_CANDIDATES]
        ]
        return tag("div", *names, class_="qw-cands qw-soft") if names else soft(text.NONE)
    places = standings.ranked(check) or range(len(found))
    indexed = [(i, *found[i]) for i in places]
    rows = [
        tag(
            "span",
            swatch(i),
            tag("span", name, class_="qw-nm", title=name),
            candidate_badge(verdict),
            class_="qw-cand",
        )
        for i, name, verdict in indexed[:_MOST_CANDIDATES]
    ]
    if more := text.more(len(indexed), _MOST_CANDIDATES):
        unmeasured = sum(verdict is None for _, _, verdict in indexed[_MOST_CANDIDATES:])
        but = f", {unmeasured} not measured" if unmeasured else ""
        rows.append(tag("span", f"{more}{but}", class_="qw-soft"))
    return tag("div", *rows, class_="qw-cands")


def _trend(check: CheckSummary) -> Html:
    num_runs = len(check.trends[0].values) if check.trends else 0
    measured = sum(v is not None for t in check.trends for v in t.values)
    if not measured:
        return tag("span", "no measurement yet", class_="qw-soft qw-small")
    runs = "1 run so far" if num_runs == 1 else f"last {num_runs} runs"
    alt = f"Output KL of {text.plural(len(check.trends), 'candidate')}, {runs}"
    at = standings.lead(check)
    band = check.bands[at] if at is not None and at < len(check.bands) else None
    guide = None if band is None or at is None else Guide(at, band.baseline, band.low, band.high)
    picture = image(sparkline(check.trends, num_runs, guide), alt, "qw-spark")
    return join([picture, tag("span", _now(check, at), runs, class_="qw-sub")])


def _now(check: CheckSummary, at: int | None) -> Html:
    """Say what the candidate that matters measures now, and how that compares."""
    if at is None:
        return Html("")
    value = standings.value_now(check, at)
    if value is None:
        return tag("span", "not measured in the newest run · ")
    change = standings.ratio(check, at)
    if check.not_comparable:
        against = f", {check.not_comparable}"
    elif check.is_baseline:
        against = ", itself the baseline"
    else:
        against = "" if change is None else f", {times(change)} {check.compared_with}"
    return join([tag("b", text.number(value)), f" now{against} · "])


def open_alerts(check: CheckSummary, silenced: int) -> Html:
    """Return how many alerts fire, and how many of them somebody knows of or silenced."""
    alerts = check.state.alerts
    if not alerts.firing:
        waiting = f"{alerts.pending} pending" if alerts.pending else "none"
        return tag("span", waiting, class_="qw-soft")
    word = alerts.severity.value if alerts.severity is not None else "firing"
    counted = tag("span", f"{alerts.firing} {word}", class_="qw-hot")
    told = [
        f"{number} {words}"
        for number, words in (
            (alerts.acknowledged, "acknowledged"),
            (silenced, "silenced"),
            (alerts.pending, "pending"),
        )
        if number
    ]
    below = tag("span", ", ".join(told) or "unacknowledged", class_="qw-sub")
    return join([link(counted, "alerts", check=check.check), below])


def _success(check: CheckSummary, now: datetime, zone: tzinfo) -> Html:
    run, at = check.decided, check.last_success
    if at is None:
        return tag("span", "never", class_="qw-soft")
    suite = text.clip(run.suite_name, 24) if run is not None else ""
    return join([moment(at, now, zone), tag("span", suite, class_="qw-sub")])


def run_table(runs: Iterable[RunSummary], now: datetime, zone: tzinfo) -> Html:
    """Return the newest runs of all checks, whatever became of them."""
    headers = ("Run", "Check", "Outcome", "Started", "Took", "Alerts")
    return table(headers, (_run_row(run, now, zone) for run in runs), "qw-runs")


def _run_row(run: RunSummary, now: datetime, zone: tzinfo) -> list[object]:
    reason = tag("span", run.reason or "", class_="qw-sub") if run.status in TROUBLE else Html("")
    return [
        tag("td", link(run.run_id, "run", run=run.run_id), class_="qw-mono qw-small"),
        tag("td", link(run.check, "check", check=run.check), class_="qw-name"),
        tag("td", badge(run.status, run.verdict), reason, class_="qw-text"),
        tag("td", moment(run.started_at, now, zone)),
        tag("td", text.took(run.started_at, run.finished_at)),
        tag("td", str(run.num_alerts) if run.num_alerts else text.NONE),
    ]
