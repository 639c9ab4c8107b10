"""Both candidates over the layers, and how many times as large B is at each."""

import math

import streamlit as st

from quantwatch_dashboard.charts.change import Ratio, change_chart
from quantwatch_dashboard.charts.layers import layer_chart
from quantwatch_dashboard.components import page, picture
from quantwatch_dashboard.components.address import pick
from quantwatch_dashboard.components.explain import term
from quantwatch_dashboard.components.markup import join
from quantwatch_dashboard.logic import contrast, naming
from quantwatch_dashboard.logic.contrast import LAYERED, Row, Side, Tests, finding
from quantwatch_dashboard.logic.lines import LayerLine

_STATISTICS = ("mean", "p50", "p99", "max")


def show(a: Side, b: Side, tests: Tests) -> None:
    """Show one metric by layer of both, on one axis."""
    kept = [
        m
        for m in LAYERED
        if any(side.value(m, x) is not None for side in (a, b) for x in side.layers)
    ]
    if not kept:
        return
    terms = [part for slug in kept for part in (" · ", term(slug))][1:]
    said = ["Both on one axis. A red ring: clearly worse in B. What is shown: ", *terms]
    page.section("Layer by layer", join(said))
    left, right, _ = st.columns([2, 2, 4])
    with left:
        metric = pick("Metric by layer", "by_layer", kept, kept[0], naming.title)
    with right:
        statistic = pick("Statistic", "statistic", _STATISTICS, "mean")
    rows = contrast.by_layer(a, b, tests, metric)
    one, two = st.columns(2, gap="medium")
    with one:
        _lines(a, b, rows, (metric, statistic))
    with two:
        _ratios(rows, metric)


def _lines(a: Side, b: Side, rows: tuple[tuple[str, Row], ...], shown: tuple[str, str]) -> None:
    metric, statistic = shown
    places = [place for place, _ in rows]
    worse = frozenset(i for i, (_, row) in enumerate(rows) if finding(row).tone == "worse")
    rings = {"A": frozenset[int](), "B": worse if statistic == "mean" else frozenset[int]()}
    lines = [
        LayerLine(f"{letter}: {side.candidate.name}", index,
                  [side.value(metric, place, statistic) for place in places],
                  strong=letter == "B", marked=rings[letter])
        for index, (letter, side) in enumerate((("A", a), ("B", b)))
    ]  # fmt: skip
    figure = layer_chart(lines, places, unit=naming.axis(metric, statistic))
    picture.choose(
        figure, "both-layers", f"{naming.title(metric)} of A and B by layer", f"compare-{metric}"
    )


def _ratios(rows: tuple[tuple[str, Row], ...], metric: str) -> None:
    found = [ratio for place, row in rows if (ratio := _ratio(place, row)) is not None]
    if not found or all(row.test is None for _, row in rows):
        words = "How many times as large B is shows here where both can be paired."
        page.hint(words)
        return
    figure = change_chart(found, unit=f"{naming.title(metric)}, mean: B ÷ A")
    picture.choose(
        figure, "ratio-layers", "B ÷ A by layer, with intervals", f"compare-{metric}-ratio"
    )
    words = "Triangles: more than chance. Lines: 95 % interval of the mean's difference, by prompt."
    page.hint(words)


def _ratio(place: str, row: Row) -> Ratio | None:
    """Return B ÷ A at a layer; None where that is no positive number."""
    if row.test is None or not row.a or not row.b:
        return None
    value = row.b / row.a
    if not math.isfinite(value) or value <= 0:
        return None
    bounds = [(row.a + edge) / row.a for edge in (row.test.low, row.test.high)]
    low, high = bounds if all(map(math.isfinite, bounds)) else (None, None)
    sign = {"worse": 1, "better": -1}.get(finding(row).tone, 0)
    return Ratio(place, value, low, high, sign)
