"""Charts over the layers: how bad it is by here, whose fault it is, and both together."""

import streamlit as st

from quantwatch.domain import CandidateResult, RunResult
from quantwatch_dashboard.charts.blame import blame_chart
from quantwatch_dashboard.charts.layers import layer_chart
from quantwatch_dashboard.components import page, picture
from quantwatch_dashboard.components.address import pick
from quantwatch_dashboard.components.blame import blame_table
from quantwatch_dashboard.components.explain import term
from quantwatch_dashboard.components.markup import join
from quantwatch_dashboard.logic import naming, series
from quantwatch_dashboard.logic.lines import Guides


def show(result: RunResult, lead: CandidateResult, chosen: str | None) -> None:
    """Show per-layer KL and isolated error side by side, then one by the other."""
    left, right = st.columns(2, gap="medium")
    with left:
        _lens(result, lead, chosen)
    with right:
        _isolated(result, lead, chosen)
    _blame(result, lead, chosen)


def _lens(result: RunResult, lead: CandidateResult, chosen: str | None) -> None:
    page.section(
        "Per-layer KL: how bad it is by here",
        join([term("lens_kl"), ": next-token distributions read off at each layer through the "
              "reference's own norm and head. Errors add up from left to right."]),
    )  # fmt: skip
    statistic = pick("Statistic", "statistic", ("mean", "p50", "p90", "p99", "max"), "mean")
    places = series.layers(result)
    figure = layer_chart(
        series.lens_lines(result, lead.name, statistic),
        places,
        unit=naming.axis("lens_kl", statistic),
        threshold=series.lens_threshold(result) if statistic == "mean" else None,
        guides=Guides(series.outlier(result, lead), chosen),
    )
    name = f"{result.run_id}-per-layer-kl-{statistic}"
    picture.choose(figure, "lens", "Per-layer KL of all candidates", name)


def _isolated(result: RunResult, lead: CandidateResult, chosen: str | None) -> None:
    page.section(
        "Isolated error: whose fault it is",
        join([term("isolated_error"), ": each module is fed the reference's own input, so errors "
              "from earlier layers don't count. A red ring marks a breached rule."]),
    )  # fmt: skip
    parts = series.parts(result)
    default = series.culprit_part(lead)
    part = pick("Part of the layer", "part", parts, default if default in parts else parts[0])
    lines = series.isolated_lines(result, lead.name, part)
    places = series.isolated_places(result, part)
    shown = next((place for place in places if series.place_key(place) == chosen), None)
    unit = naming.axis("isolated_error", "mean")
    figure = layer_chart(lines, places, unit=unit, guides=Guides(None, shown))
    name = f"{result.run_id}-isolated-error-{part.replace(' ', '-')}"
    picture.choose(figure, "isolated", "Isolated error of all candidates by layer", name)


def _blame(result: RunResult, lead: CandidateResult, chosen: str | None) -> None:
    found = series.blamed(result, lead.name)
    if not found:
        return
    page.section(
        "Propagated against isolated error",
        join(
            [
                "One point per place that has both. Far right, it has a large ",
                term("isolated_error"),
                ": it makes the error itself. High up, it has a large ",
                term("rel_error"),
                ", but is not far right: it only passes on what arrives.",
            ]
        ),
    )
    left, right = st.columns([3, 2], gap="medium")
    with left:
        figure = blame_chart(found, chosen)
        name = f"{result.run_id}-propagated-against-isolated"
        picture.choose(figure, "blame", "Relative error against isolated error, by place", name)
    with right:
        st.html(blame_table(next((one for one in found if one.strong), found[0]), result.run_id))
