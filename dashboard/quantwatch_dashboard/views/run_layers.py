"""Two charts over the layers: how bad it is by here, and whose fault it is."""

import plotly.graph_objects as go
import streamlit as st

from quantwatch.domain import CandidateResult, RunResult
from quantwatch_dashboard import series
from quantwatch_dashboard.charts.layers import layer_chart
from quantwatch_dashboard.components import page
from quantwatch_dashboard.components.picker import pick


def show(result: RunResult, lead: CandidateResult) -> None:
    """Show per-layer KL and isolated error of all candidates side by side."""
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
    at = series.outlier(result, lead)
    figure = layer_chart(
        series.lens_lines(result, lead.name, statistic),
        places,
        unit=f"per-layer KL in nats, {statistic}",
        threshold=series.lens_threshold(result) if statistic == "mean" else None,
        guide=places.index(at) if at in places else None,
    )
    _chart(figure, "lens", "Per-layer KL of all candidates")


def _isolated(result: RunResult, lead: CandidateResult) -> None:
    page.section(
        "Isolated error: whose fault it is",
        "Each module is fed the reference's own input, so errors from earlier layers don't count:"
        " ‖Δ‖ ÷ ‖the reference's update‖. A red ring marks a breached rule.",
    )
    parts = series.parts(result)
    default = series.culprit_part(lead)
    part = pick("Part of the layer", "part", parts, default if default in parts else parts[0])
    lines = series.isolated_lines(result, lead.name, part)
    places = series.isolated_places(result, part)
    _chart(layer_chart(lines, places, unit="isolated error, mean"), "isolated",
           "Isolated error of all candidates by layer")  # fmt: skip


def _chart(figure: go.Figure, key: str, alt: str) -> None:
    st.plotly_chart(figure, key=key, config={"displaylogo": False}, alt=alt)
