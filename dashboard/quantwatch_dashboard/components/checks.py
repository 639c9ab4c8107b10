"""The overview's rows: one per check, and the list of recent runs."""

from collections.abc import Iterable, Mapping
from datetime import datetime, tzinfo

from quantwatch.domain import RunStatus, Verdict
from quantwatch.store.records import RunSummary
from quantwatch_dashboard import text
from quantwatch_dashboard.charts.sparkline import sparkline
from quantwatch_dashboard.components.candidates import swatch
from quantwatch_dashboard.components.markup import Html, image, join, link, table, tag
from quantwatch_dashboard.components.verdict import TROUBLE, badge, candidate_badge
from quantwatch_dashboard.summaries import CheckSummary

_HEADERS = (
    "Verdict",
    "Check",
    "Candidates",
    "Output KL over runs (log)",
    "Open alerts",
    "Last run",
    "",
)


def check_table(
    checks: Iterable[CheckSummary], faults: Mapping[str, str], now: datetime, zone: tzinfo
) -> Html:
    """Return one row per check in the given order; `faults` says where a check broke."""
    return table(
        _HEADERS,
        (_check_row(check, faults.get(check.check, ""), now, zone) for check in checks),
        "qw-overview",
    )


def _check_row(check: CheckSummary, fault: str, now: datetime, zone: tzinfo) -> list[object]:
    run = check.decided or check.newest
    if run is None:
        return _unmeasured_row(check)
    where = tag("span", fault, class_="qw-sub") if fault else Html("")
    return [
        tag("td", badge(run.status, run.verdict), _since(check, now, zone)),
        tag(
            "td",
            link(check.check, "run", run=run.run_id),
            where,
            _trouble(check, now),
            class_="name",
        ),
        tag("td", _candidates(run)),
        tag("td", _trend(check)),
        tag("td", _alerts(check), data_label="Open alerts"),
        tag(
            "td",
            moment((check.newest or run).started_at, now, zone),
            tag("span", _suite(run), class_="qw-sub"),
            data_label="Last run",
        ),
        tag("td", link("Open run →", "run", run=run.run_id), class_="n"),
    ]


def _unmeasured_row(check: CheckSummary) -> list[object]:
    """Return the row of a check that never came to an end."""
    waiting = "waits for its first run" if check.state.unended else "has not run yet"
    told = tag("span", waiting, class_="qw-soft")
    nothing = tag("span", "–", class_="qw-soft")
    names = tag("div", *(tag("span", name, class_="c") for name in check.candidates[:6]))
    cells = (told, tag("span", check.check), names, nothing, nothing, nothing)
    return [*(tag("td", cell) for cell in cells), tag("td")]


def moment(when: datetime, now: datetime, zone: tzinfo) -> Html:
    """Return an age; the absolute time in the reader's zone shows on hover."""
    return tag(
        "time", text.age(when, now), datetime=when.isoformat(), title=text.instant(when, zone)
    )


def _since(check: CheckSummary, now: datetime, zone: tzinfo) -> Html:
    if check.since is None:
        return tag("span", "never succeeded", class_="qw-sub")
    return tag("span", "since ", moment(check.since, now, zone), class_="qw-sub")


def _trouble(check: CheckSummary, now: datetime) -> Html:
    """Say that the newest run did not finish: shown apart from the verdict."""
    run = check.trouble
    if run is None:
        return Html("")
    reason = text.clip(run.reason or "no reason was recorded", 160)
    ended = f"newest run {run.status.value} {text.age(run.started_at, now)}: {reason}"
    cancelled = run.status == RunStatus.CANCELLED
    said = f"⚡ N{ended[1:]}" if cancelled else f"⚡ Monitor trouble: {ended}"
    return tag("div", tag("span", said, class_="qw-trouble"))


def _candidates(run: RunSummary) -> Html:
    order = list(Verdict)
    indexed = [(i, name, verdict) for i, (name, verdict) in enumerate(run.candidates)]
    indexed.sort(key=lambda c: order.index(c[2]) if c[2] is not None else -1)
    rows = [
        tag(
            "span",
            swatch(i),
            tag("span", name, class_="nm", title=name),
            candidate_badge(verdict),
            class_="c",
        )
        for i, name, verdict in indexed[:6]
    ]
    if len(indexed) > 6:
        rows.append(tag("span", f"and {len(indexed) - 6} more", class_="qw-soft"))
    return tag("div", *rows, class_="qw-cands") if rows else tag("span", "–", class_="qw-soft")


def _trend(check: CheckSummary) -> Html:
    num_runs = len(check.trends[0].values) if check.trends else 0
    measured = sum(v is not None for t in check.trends for v in t.values)
    if not measured:
        return tag("span", "no measurement yet", class_="qw-soft qw-small")
    alt = f"Output KL of {len(check.trends)} candidates over the last {num_runs} runs"
    runs = "1 run so far" if num_runs == 1 else f"last {num_runs} runs"
    return join(
        [
            image(sparkline(check.trends, num_runs), alt, "qw-spark"),
            tag("span", runs, class_="qw-sub"),
        ]
    )


def _alerts(check: CheckSummary) -> Html:
    num = check.decided.num_alerts if check.decided is not None else 0
    if not num:
        return tag("span", "none" if check.decided is not None else "–", class_="qw-soft")
    return link(tag("span", str(num), class_="qw-hot"), "alerts", check=check.check)


def _suite(run: RunSummary) -> str:
    return f"{run.suite_name} · {run.num_tokens:,} tokens" if run.suite_name else "nothing measured"


def run_table(runs: Iterable[RunSummary], now: datetime, zone: tzinfo) -> Html:
    """Return the newest runs of all checks, whatever became of them."""
    headers = ("Run", "Check", "Outcome", "Started", "Took", "Alerts")
    return table(headers, (_run_row(run, now, zone) for run in runs), "qw-runs")


def _run_row(run: RunSummary, now: datetime, zone: tzinfo) -> list[object]:
    took = (
        text.duration((run.finished_at - run.started_at).total_seconds())
        if run.finished_at
        else "–"
    )
    reason = tag("span", run.reason or "", class_="qw-sub") if run.status in TROUBLE else Html("")
    return [
        tag("td", link(run.run_id, "run", run=run.run_id), class_="qw-mono qw-small"),
        tag("td", run.check, class_="name"),
        tag("td", badge(run.status, run.verdict), reason, class_="words"),
        tag("td", moment(run.started_at, now, zone)),
        tag("td", took),
        tag("td", str(run.num_alerts) if run.num_alerts else "–"),
    ]
