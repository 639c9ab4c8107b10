"""Run: how it ended, whose fault it is, at which layer and token."""

import streamlit as st

from quantwatch.domain import CandidateResult, RunResult
from quantwatch.metrics.registry import VERSION
from quantwatch.store.records import RunSummary
from quantwatch_dashboard import clock, text
from quantwatch_dashboard.components import facts, page, run_card, trouble
from quantwatch_dashboard.components.address import pick
from quantwatch_dashboard.components.breaches import alert_table
from quantwatch_dashboard.components.candidates import side_by_side, tiles
from quantwatch_dashboard.components.markup import link
from quantwatch_dashboard.logic import series
from quantwatch_dashboard.queries import connection, overview, runs
from quantwatch_dashboard.views import (
    run_attribution,
    run_details,
    run_inside,
    run_layers,
    run_positions,
    run_state,
)


@trouble.guarded
def show() -> None:
    """Show the run named in the address; without a name, that of the worst check."""
    page.begin()
    url = connection.url()
    named = st.query_params.get("run") or _first(url)
    if named is None:
        page.head("Run")
        st.html(trouble.empty())
        return
    result = runs.result(url, runs.resolve(url, named))
    lead = series.leading(result)
    _head(url, result)
    if result.status.is_ended:
        st.html(run_card.card(result, clock.now(), clock.zone()))
    if result.candidates and result.metrics_version != VERSION:
        st.html(facts.other_metrics(result.metrics_version, VERSION))
    run_state.show(url, result)
    if lead is not None:
        st.html(tiles(result, lead))
        _figures(result, lead)
        run_inside.show(url, result, lead)
        run_attribution.show(url, result)
    if result.verdict is not None:
        _alerts(result)
    run_details.show(result)


def _first(url: str) -> str | None:
    for check in overview.checks(url):
        if (run := check.decided or check.newest) is not None:
            return run.run_id
    return next((run.run_id for run in runs.recent_runs(url)), None)


def _head(url: str, result: RunResult) -> None:
    """Show which check this is and let the reader go to its other runs."""
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    recent = {run.run_id: run for run in runs.recent_runs(url, result.check, 50)}
    names = list(recent) if result.run_id in recent else [result.run_id, *recent]
    with left:
        page.head(
            result.check,
            "run of ",
            text.minute(result.started_at, clock.zone()),
            *(_compare(result) if result.verdict is not None else ()),
        )
    with right:
        chosen = pick("Run", "run", names, result.run_id, lambda run_id: _run_name(recent, run_id))
    if chosen != result.run_id:
        st.rerun()


def _compare(result: RunResult) -> tuple[object, ...]:
    return " · ", link("compare with …", "compare", run_b=result.run_id)


def _run_name(recent: dict[str, RunSummary], run_id: str) -> str:
    run = recent.get(run_id)
    if run is None:
        return run_id
    outcome = run.verdict.value if run.verdict is not None else run.status.value
    return text.run_line(text.minute(run.started_at, clock.zone()), outcome, run_id)


def _figures(result: RunResult, lead: CandidateResult) -> None:
    page.section(
        "Candidates side by side",
        "KL(reference ‖ candidate) over the full vocabulary, ± its standard error by prompt."
        " Bars compare the means.",
    )
    st.html(side_by_side(result))
    run_layers.show(result, lead, run_inside.chosen_layer(result))
    run_positions.show(result)


def _alerts(result: RunResult) -> None:
    page.section("Alerts", "Every rule that this run breached, critical ones first.")
    if result.alerts:
        st.html(alert_table(result.alerts, (c.name for c in result.candidates)))
    else:
        page.say("No rule is breached.")
