"""A check's trend: one statistic at one place over its runs, and what happened beside it."""

from dataclasses import replace

import streamlit as st

from quantwatch_dashboard import clock, text
from quantwatch_dashboard.charts.trend import hidden_limits, trend_chart
from quantwatch_dashboard.components import page, picture, trouble
from quantwatch_dashboard.components.address import choose, flag
from quantwatch_dashboard.components.explain import term
from quantwatch_dashboard.components.markup import join, tag
from quantwatch_dashboard.logic import naming, standings
from quantwatch_dashboard.logic.naming import Statistic
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.logic.trends import Trend
from quantwatch_dashboard.queries import check as check_queries
from quantwatch_dashboard.queries.check import HEADLINE
from quantwatch_dashboard.queries.trend import is_on_log, shown_trend

_RANGES = {"90": 90, "30": 30, "365": 365, "all": None}
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p999", "max", "min", "std")


@st.fragment
@trouble.guarded
def show(url: str, summary: CheckSummary) -> None:
    """Show the trend; changing a picker redraws only this part."""
    page.section("Trend over the runs")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        shown, candidate, span = _pickers(url, summary)
        alone = len(summary.candidates) > 1 and flag("Only this candidate", "alone")
    is_log = is_on_log(shown)
    trend = shown_trend(url, summary, shown, (candidate, span))
    if alone:
        trend = replace(trend, lines=tuple(one for one in trend.lines if one.name == candidate))
    title = f"{naming.axis(shown.metric, shown.name)} · {text.scope(shown.scope)}"
    st.html(tag("p", *_explained(shown, trend, is_log), class_="qw-soft qw-small"))
    if not any(value is not None for value in trend.values):
        page.note("Nothing was measured of that in these runs.")
        return
    figure = trend_chart(trend, unit=title, is_log=is_log, zone=clock.zone())
    name = f"{summary.check}-{'-'.join(shown)}"
    run = picture.jump(figure, "trend", f"{title} of {summary.check} over its runs", name)
    if run is not None:
        _open(run)


def _open(run: str) -> None:
    from quantwatch_dashboard import views  # which imports this module

    pages = {page.url_path: page for page in views.pages()}
    st.switch_page(pages["run"], query_params={"run": run})


def _pickers(url: str, summary: CheckSummary) -> tuple[Statistic, str, int | None]:
    """Let the reader choose metric, place, statistic, candidate and range."""
    run = summary.decided
    assert run is not None, "only checks with results have a trend"
    places = check_queries.places(url, run.run_id) or (HEADLINE[:2],)
    metrics = list(
        dict.fromkeys([m for m, _ in places if m == HEADLINE[0]] + [m for m, _ in places])
    )
    metric = choose("Metric", "metric", metrics, naming.title, width=220, moves=True)
    scope = choose("Place", "place", [s for m, s in places if m == metric], width=230, moves=True)
    statistic = choose("Statistic", "statistic", _STATISTICS, width=110)
    at = standings.lead(summary) or 0
    names = [
        summary.candidates[at],
        *(n for n in summary.candidates if n != summary.candidates[at]),
    ]
    candidate = choose("Candidate", "candidate", names, width=200, moves=True)
    words = {"all": "all runs"}
    span = choose("Range", "range", list(_RANGES), lambda n: words.get(n, f"{n} runs"), width=120)
    return Statistic(metric, scope, statistic), candidate, _RANGES[span]


def _explained(shown: Statistic, trend: Trend, is_log: bool) -> list[object]:
    """Say what is drawn, and what is not."""
    said: list[object] = [
        join([term(shown.metric), ". A click on a point opens its run. "]),
        _against(shown, trend),
        "Triangles at the top: something changed; bars at the bottom: a run with no result. ",
    ]
    if trend.left_out:
        said.append(
            f"{trend.left_out:,} runs are not drawn: of each stretch the one that stands out is. "
        )
    if hidden := hidden_limits(trend, is_log=is_log):
        said.append(f"Beyond the picture: {', '.join(hidden)}.")
    return said


def _against(shown: Statistic, trend: Trend) -> str:
    """Say what the dashed line is, or why there is none."""
    compared = trend.compared
    if compared.baseline is None:
        why = compared.why_not or "no baseline"
        return f"No line to compare with: {why}. "
    within = "what the rule against it allows" if shown == HEADLINE else "three noise floors"
    what = "" if compared.words == "baseline" else f", the {compared.words}"
    shaded = f"; shaded: {within}" if compared.band is not None else ""
    return f"Dashed: what {trend.strong} is compared with{what}{shaded}. "
