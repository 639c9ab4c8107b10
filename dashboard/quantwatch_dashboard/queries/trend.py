"""What a trend shows of one statistic: lines, what they are compared with, what happened beside."""

from collections.abc import Sequence

from quantwatch.metrics.registry import METRICS
from quantwatch.store.kinds import from_kind
from quantwatch.store.records import SeriesPoint
from quantwatch_dashboard.logic import trends
from quantwatch_dashboard.logic.bands import noise_band
from quantwatch_dashboard.logic.history import limits
from quantwatch_dashboard.logic.naming import Statistic
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.logic.trends import Compared, Trend
from quantwatch_dashboard.queries import check as check_queries
from quantwatch_dashboard.queries.check import HEADLINE

_SPREAD = "std"
"""A spread has neither a baseline's noise nor a scale of its own."""


def is_on_log(shown: Statistic) -> bool:
    """Say whether a statistic is drawn on a log axis."""
    spec = METRICS.get(shown.metric)
    return spec is not None and spec.log_scale and shown.name != _SPREAD


def shown_trend(
    url: str, summary: CheckSummary, shown: Statistic, chosen: tuple[str, int | None]
) -> Trend:
    """Return a trend; `chosen` is the candidate and how many of the newest runs, None for all."""
    candidate, count = chosen
    limit = check_queries.MOST_RUNS if count is not None else check_queries.ALL_RUNS
    marks = trends.newest_runs(check_queries.marks(url, summary.check, limit), count)
    points = check_queries.trend(url, summary.check, shown, limit)
    own = [p for p in points if p.candidate == candidate]
    # Colors stay when a range leaves a candidate out.
    order = [line.name for line in trends.lines_of(points, summary.candidates)]
    lines, left_out = trends.thinned(trends.lines_of(trends.within(points, marks), order))
    changed = check_queries.changed(url, summary.check, limit)
    return Trend(
        lines=lines,
        strong=candidate,
        compared=_compared(url, summary, shown, own, candidate),
        changes=trends.changes_within(changed, marks),
        failures=trends.failures(marks),
        pinned_run=summary.state.baseline_run_id,
        left_out=left_out,
    )


def _compared(
    url: str,
    summary: CheckSummary,
    shown: Statistic,
    own: Sequence[SeriesPoint],
    candidate: str,
) -> Compared:
    """Return what a candidate's points are held against; runs of something else are nothing."""
    absolute = limits(summary.state.config, candidate, *shown) or ()
    run_id = summary.state.baseline_run_id
    if run_id is None or summary.not_comparable:
        return Compared(limits=absolute, why_not=summary.not_comparable)
    # Read by its id: a run that was pinned long ago is not among the newest ones.
    found = check_queries.points_of(url, run_id, shown)
    before = next((p for p in found if p.candidate == candidate), None)
    baseline = None if before is None else from_kind(before.value, before.kind)
    band = _band(summary, shown, candidate)
    if band is None and shown.name != _SPREAD:
        band = noise_band(baseline, [p.floor for p in own], is_log=is_on_log(shown))
    why_not = "" if baseline is not None else "the baseline run has no such value"
    words = "newest run of the window" if summary.is_rolling else "baseline"
    return Compared(baseline, band, absolute, words, why_not)


def _band(summary: CheckSummary, shown: Statistic, candidate: str) -> tuple[float, float] | None:
    """Return what the rule on the headline allows; other statistics have only their noise."""
    if shown != HEADLINE or candidate not in summary.candidates:
        return None
    known = summary.bands[summary.candidates.index(candidate)]
    return None if known is None else (known.low, known.high)
