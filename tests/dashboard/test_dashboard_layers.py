"""The layer charts and sparklines: logarithmic, and honest about what has no logarithm."""

import base64
import math
import re

import pytest

from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.layers import layer_chart
from quantwatch_dashboard.charts.sparkline import sparkline
from quantwatch_dashboard.charts.strip import strip
from quantwatch_dashboard.logic.lines import LayerLine, Sparkline

PLACES = tuple(f"layers.{i}" for i in range(4))


def test_zero_lies_on_a_row_of_its_own() -> None:
    """Catches exact zeros that vanish from a log axis: bit-equal layers are the best news there is."""
    figure = layer_chart([LayerLine("a", 0, [0.0, 1e-3, 1e-2, 0.1])], PLACES, unit="nats")

    trace, axis = figure.data[0], figure.layout.yaxis
    assert 0 < trace.y[0] < 1e-3
    assert axis.ticktext[list(axis.tickvals).index(trace.y[0])] == "0 (exact)"
    assert trace.marker.symbol[0] == "circle-open"
    assert trace.customdata[0][1] == "0"


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_nonfinite_is_on_top_and_named(value: float) -> None:
    """Catches a gap where the model returns NaN."""
    figure = layer_chart([LayerLine("a", 0, [1e-3, value, None, 1.0])], PLACES, unit="nats")

    trace = figure.data[0]
    assert trace.y[1] > 1.0
    assert trace.y[2] is None
    assert "NaN, ∞" in figure.layout.yaxis.ticktext
    assert trace.marker.symbol[1] == "x"


def test_all_equal_models_have_a_chart() -> None:
    """Catches log of nothing: every value 0, or nothing measured at all."""
    for values in ([0.0] * 4, [None] * 4):
        assert layer_chart([LayerLine("a", 0, values)], PLACES, unit="nats").data


def test_threshold_and_outlier_are_drawn() -> None:
    """Catches an annotation at the value instead of its logarithm, which lands off the line."""
    line = LayerLine(
        "int8",
        1,
        [0.01, 0.3, 0.01, 0.01],
        strong=True,
        marked=frozenset({1}),
        culprit=1,
        label="layers.1.mlp",
    )
    figure = layer_chart([line], PLACES, unit="nats", threshold=0.15)

    texts = {a.text: a.y for a in figure.layout.annotations}
    assert texts[palette.ink("threshold 0.15", palette.CULPRIT)] == pytest.approx(math.log10(0.15))
    assert texts[palette.ink("<b>L1 mlp</b>", palette.CULPRIT)] == pytest.approx(math.log10(0.3))
    assert figure.layout.shapes[0].y0 == 0.15
    assert list(figure.data[1].x) == [1]


@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_a_threshold_without_a_place_on_the_axis_is_told(threshold: float) -> None:
    """Catches the logarithm of a rule by which layers must be equal, on just the run that fails."""
    figure = layer_chart(
        [LayerLine("int8", 0, [0.01] * 4)], PLACES, unit="nats", threshold=threshold
    )

    assert [a.text for a in figure.layout.annotations] == [
        palette.ink(f"threshold {threshold:g}, below this axis", palette.CULPRIT)
    ]
    assert not figure.layout.shapes


def test_ends_are_not_joined_to_layers() -> None:
    """Catches a line that plunges from the embedding's exact 0 to the first layer's error."""
    places = ("embedding", "layers.0", "layers.1", "final_norm", "head")
    trace = layer_chart([LayerLine("a", 0, [0.0, 1.0, 2.0, 3.0, 0.0])], places, unit="1").data[0]

    assert list(trace.x) == [0, None, 1, 2, None, 3, 4]
    assert [row[1] for row in trace.customdata][2] == "1.00"


def test_names_are_escaped_and_lines_differ() -> None:
    """Catches markup in a candidate's name, and candidates told apart by color alone."""
    lines = [LayerLine("<i>a</i>", i, [1.0] * 4) for i in range(4)]
    figure = layer_chart(lines, PLACES, unit="nats")

    assert figure.data[0].name == "&lt;i&gt;a&lt;/i&gt;"
    assert len({(t.line.dash, t.marker.symbol[0]) for t in figure.data}) == 4


@pytest.mark.parametrize(
    "values",
    [[1e-3, None, 1e-2], [0.0, 0.0], [math.nan, 1.0], [None], [5.0]],
    ids=["gap", "zeros", "nan", "nothing", "one run"],
)
def test_sparkline_is_an_image(values: list[float | None]) -> None:
    """Catches trends that can't be drawn: one run, exact zeros, NaN, missing runs."""
    uri = sparkline([Sparkline(0, values)], len(values))

    svg = base64.b64decode(uri.removeprefix("data:image/svg+xml;base64,")).decode()
    assert svg.startswith("<svg")
    assert "nan" not in svg
    assert svg.count("<circle") == (0 if values == [None] else 1)


def test_sparkline_does_not_bridge_a_missing_run() -> None:
    """Catches a line through a run that measured nothing."""
    svg = base64.b64decode(
        sparkline([Sparkline(0, [1.0, 2.0, None, 3.0, 4.0])], 5).split(",")[1]
    ).decode()

    assert svg.count("<polyline") == 2


def bars(values: list[float | None], marked: int) -> list[tuple[float, str]]:
    """Return height and color of each bar of a strip, without the ground line."""
    uri = strip(values, marked)
    svg = base64.b64decode(uri.removeprefix("data:image/svg+xml;base64,")).decode()
    found = re.findall(r'height="([\d.]+)" fill="(#\w+)"', svg)
    return [(float(height), color) for height, color in found][:-1]


def test_strip_shows_the_place_that_broke() -> None:
    """Catches a red bar at another place, a scale that isn't from 0, or gaps that are bars."""
    drawn = bars([0.0, 1.0, None, 4.0], 3)

    assert [color for _, color in drawn] == [palette.MUTED, palette.MUTED, palette.CULPRIT]
    assert drawn[1][0] == pytest.approx(drawn[2][0] / 4)
    assert 0 < drawn[0][0] < drawn[1][0]


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_strip_is_tallest_where_it_is_not_finite(value: float) -> None:
    """Catches NaN as a height, which is no SVG, and as a bar of height 0."""
    assert bars([1.0, value], 1)[1][0] == bars([1.0, value], 1)[0][0] > 0
    assert bars([0.0, value], 1)[1][0] > bars([0.0, value], 1)[0][0]


def test_strip_without_places_is_refused() -> None:
    """Catches a division by the number of places."""
    with pytest.raises(ValueError, match="at least one place"):
        strip([], 0)


def test_lead_is_solid_and_below_the_others() -> None:
    """Catches a thick line that hides the thin ones that are equal to it."""
    lines = [LayerLine("a", 0, [1.0] * 4), LayerLine("b", 1, [1.0] * 4, strong=True)]
    thin, thick = layer_chart(lines, PLACES, unit="nats").data

    assert (thick.line.dash, thin.line.width < thick.line.width) == ("solid", True)
    assert thick.zorder < thin.zorder
