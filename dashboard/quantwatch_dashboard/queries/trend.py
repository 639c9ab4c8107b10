"""What a trend shows of one statistic: lines, what they are compared with, what happened beside."""

from quantwatch.metrics.registry import METRICS
from quantwatch_dashboard import trends
from quantwatch_dashboard.history import limits
from quantwatch_dashboard.queries import check as check_queries
from quantwatch_dashboard.queries.check import HEADLINE, Shown
from quantwatch_dashboard.summaries import CheckSummary
from quantwatch_dashboard.trends import Compared, Trend

_SPREAD = "std"
"""A spread has neither a baseline's noise nor a scale of its own."""


def is_on_log(shown: Shown) -> bool:
    """Say whether a statistic is drawn on a log axis."""
    spec = METRICS.get(shown[0])
    return spec is not None and spec.log_scale and shown[2] != _SPREAD


def shown_trend(
    given: str, summary: CheckSummary, shown: Shown, chosen: tuple[str, int | None]
) -> Trend:
    """Return a trend; `chosen` is the candidate and how many of the newest runs, None for all."""
    candidate, count = chosen
    limit = check_queries.MOST_RUNS if count is not None else check_queries.ALL_RUNS
    marks = trends.newest_runs(check_queries.marks(given, summary.check, limit), count)
    points = check_queries.trend(given, summary.check, shown, limit)
    own = [p for p in points if p.candidate == candidate]
    # Colors stay when a range leaves a candidate out.
    order = [line.name for line in trends.lines_of(points, summary.candidates)]
    lines, left_out = trends.thinned(trends.lines_of(trends.within(points, marks), order))
    pinned = summary.state.baseline_run_id
    before = next((p for p in own if p.run_id == pinned), None)
    baseline = trends.value_of(before) if before is not None else None
    band = _band(summary, shown, candidate)
    if band is None and shown[2] != _SPREAD:
        floors = {p.run_id: p.floor for p in own}
        band = trends.noise_band(baseline, floors, is_log=is_on_log(shown))
    changed = check_queries.changed(given, summary.check, limit)
    return Trend(
        lines=lines,
        strong=candidate,
        compared=Compared(baseline, band, limits(summary.state.config, candidate, *shown) or ()),
        changes=trends.changes_within(changed, marks),
        failures=trends.failures(marks),
        pinned_run=pinned,
        left_out=left_out,
    )


def _band(summary: CheckSummary, shown: Shown, candidate: str) -> tuple[float, float] | None:
    """Return what the rule on the headline allows; other statistics have only their noise."""
    if shown != HEADLINE or candidate not in summary.candidates:
        return None
    known = summary.bands[summary.candidates.index(candidate)]
    return None if known is None else (known.low, known.high)
