"""A check's candidates: the newest run side by side, and what each costs in bits."""

from collections.abc import Iterator

import streamlit as st

from quantwatch.metrics.registry import METRICS
from quantwatch_dashboard.charts.tradeoff import tradeoff_chart
from quantwatch_dashboard.components import page, picture
from quantwatch_dashboard.components.markup import join, link
from quantwatch_dashboard.components.quality import candidate_table
from quantwatch_dashboard.logic import naming
from quantwatch_dashboard.logic.naming import Statistic
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.queries import check as check_queries

_AGREEMENT = Statistic("top1_agreement", "model", "mean")


def show(url: str, summary: CheckSummary) -> None:
    """Show the candidates of the newest succeeded run."""
    run = summary.decided
    assert run is not None, "only checks with results have candidates to compare"
    mark = next(
        (m for m in check_queries.marks(url, summary.check) if m.run_id == run.run_id), None
    )
    if mark is None:
        return
    left, right = st.columns([5, 3], gap="medium")
    with left:
        page.section("Candidates side by side", join(_explained(summary, run.run_id)))
        points = check_queries.trend(url, summary.check)
        agreement = check_queries.trend(url, summary.check, _AGREEMENT)
        st.html(candidate_table(summary, mark, points, agreement))
    with right:
        page.section(
            "Quality against bits per weight",
            "Further down and further left is better. Filled points are on the Pareto front.",
        )
        _tradeoff(url, summary)


def _explained(summary: CheckSummary, run: str) -> Iterator[object]:
    before = summary.state.baseline_run_id
    yield "The "
    yield link("newest run with results", "run", run=run)
    if summary.not_comparable:
        yield f", {summary.not_comparable}."
    else:
        yield f", each candidate against its own value in {summary.compared_with}."
    if before is not None and before != run:
        yield " "
        yield link("Compare the two runs", "compare", run_a=before, run_b=run)
        yield " layer by layer."


def _tradeoff(url: str, summary: CheckSummary) -> None:
    found = check_queries.pareto(url, summary.check)
    if not found:
        page.say("No candidate's size is known.")
        return
    metric, _, statistic = check_queries.HEADLINE
    figure = tradeoff_chart(
        found, unit=naming.axis(metric, statistic), is_log=METRICS[metric].log_scale
    )
    alt = f"Output KL against bits per weight of {len(found)} candidates"
    picture.show(figure, "tradeoff", alt, f"{summary.check}-quality-by-size")
