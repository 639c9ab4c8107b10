"""Run: how it ended, whose fault it is, at which layer and token."""

import plotly.graph_objects as go
import streamlit as st

from quantwatch.domain import CandidateResult, RunResult
from quantwatch.store.records import RunSummary
from quantwatch_dashboard import clock, queries, series
from quantwatch_dashboard.charts.layers import layer_chart
from quantwatch_dashboard.components import page, trouble
from quantwatch_dashboard.components.alerts import alert_table
from quantwatch_dashboard.components.candidates import side_by_side, tiles
from quantwatch_dashboard.components.hero import hero, leading
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.components.picker import pick
from quantwatch_dashboard.views import run_details, run_inside


@trouble.guarded
def show() -> None:
    """Show the run named in the address, the newest one without a name."""
    page.begin()
    url = queries.url()
    if not queries.recent_runs(url):
        page.head("Run")
        st.html(trouble.empty())
        return
    result = queries.result(url, queries.resolve(url, st.query_params.get("run") or "latest"))
    lead = leading(result)
    _head(url, result)
    st.html(hero(result, clock.now(), clock.zone()))
    if lead is not None:
        st.html(tiles(lead))
        _figures(result, lead)
        run_inside.show(url, result, lead)
    _alerts(result)
    run_details.show(result)


def _head(url: str, result: RunResult) -> None:
    """Show which check this is and let the reader go to its other runs."""
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    recent = {run.run_id: run for run in queries.recent_runs(url, result.check, 50)}
    names = list(recent) if result.run_id in recent else [result.run_id, *recent]
    with left:
        page.head(
            result.check,
            "run of ",
            result.started_at.astimezone(clock.zone()).strftime("%-d %B %Y, %H:%M"),
        )
    with right:
        chosen = pick("Run", "run", names, result.run_id, lambda run_id: _run_name(recent, run_id))
    if chosen != result.run_id:
        st.rerun()


def _run_name(recent: dict[str, RunSummary], run_id: str) -> str:
    run = recent.get(run_id)
    if run is None:
        return run_id
    outcome = run.verdict.value if run.verdict is not None else run.status.value
    return f"{run.started_at.astimezone(clock.zone()):%Y-%m-%d %H:%M} · {outcome} · …{run_id[-6:]}"


def _figures(result: RunResult, lead: CandidateResult) -> None:
    page.section(
        "Candidates side by side",
        "KL(reference ‖ candidate) over the full vocabulary, ± its standard error by prompt. Bars compare the means.",
    )
    st.html(side_by_side(result))
    left, right = st.columns(2, gap="medium")
    with left:
        _lens(result, lead)
    with right:
        _isolated(result, lead)


def _lens(result: RunResult, lead: CandidateResult) -> None:
    page.section(
        "Per-layer KL: how bad it is by here",
        "Next-token distributions read off at each layer through the reference's own norm and head."
        " Errors add up from left to right.",
    )
    statistic = pick("Statistic", "statistic", ("mean", "p50", "p90", "p99", "max"), "mean")
    places = series.layers(result)
    at = series.culprit_layer(lead)
    figure = layer_chart(
        series.lens_lines(result, lead.name, statistic),
        places,
        unit=f"nats, {statistic}",
        threshold=series.lens_threshold(result) if statistic == "mean" else None,
        guide=places.index(at) if at in places else None,
    )
    _chart(figure, "lens", "Per-layer KL of all candidates")


def _isolated(result: RunResult, lead: CandidateResult) -> None:
    page.section(
        "Isolated error: whose fault it is",
        "Each module is fed the reference's own input, so errors from earlier layers don't count."
        " A red ring marks a breached rule.",
    )
    parts = series.parts(result)
    default = series.culprit_part(lead)
    part = pick("Part of the layer", "part", parts, default if default in parts else parts[0])
    lines = series.isolated_lines(result, lead.name, part)
    places = series.isolated_places(result, part)
    _chart(layer_chart(lines, places, unit="relative to the update, mean"), "isolated",
           "Isolated error of all candidates by layer")  # fmt: skip


def _chart(figure: go.Figure, key: str, alt: str) -> None:
    st.plotly_chart(figure, key=key, config={"displaylogo": False}, alt=alt)


def _alerts(result: RunResult) -> None:
    page.section("Alerts", "Every rule that this run breached, critical ones first.")
    if result.alerts:
        st.html(alert_table(result))
    else:
        st.html(tag("p", "No rule is breached.", class_="qw-soft"))
