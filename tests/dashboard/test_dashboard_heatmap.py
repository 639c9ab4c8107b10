"""Heatmaps: pooling keeps the peak, the scale is honest, and a figure never grows too large."""

import math

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import example, given
from hypothesis import strategies as some
from numpy.typing import NDArray

from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.heatmap import Look, heatmap
from quantwatch_dashboard.charts.scale import log_scale
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace, side_by_side
from quantwatch_dashboard.logic.pooling import MAX_CELLS, max_pool

HOSTILE = "<script>alert(1)</script> $x$ :red[y] %{z}"


def make_grid(values: NDArray[np.float64], piece: str | None = " the") -> TokenGrid:
    rows, columns = values.shape
    places = tuple(TokenPlace(11, 3 + j, 100 + j, piece) for j in range(columns))
    scopes = tuple(f"layers.{i}" for i in range(rows))
    return TokenGrid(scopes, places, values, np.zeros(values.shape, bool))


@pytest.mark.slow
@given(
    rows=some.integers(1, 40),
    columns=some.integers(1, 300),
    cells=some.integers(1, 400),
    seed=some.integers(0, 99),
)
def test_pooling_keeps_the_peak(rows: int, columns: int, cells: int, seed: int) -> None:
    """Catches a mean or a dropped last block, which would hide the one bad token."""
    values = np.random.default_rng(seed).lognormal(0, 3, (rows, columns))
    pooled = max_pool(values, np.zeros(values.shape, bool), cells)

    assert pooled.values.size <= max(cells, 1)
    assert pooled.values.max() == values.max()


@pytest.mark.parametrize("worst", [math.nan, math.inf, 5.0, 0.0, -math.inf], ids=str)
def test_pooled_cell_shows_the_worst(worst: float) -> None:
    """Catches NaN or ∞ that disappear behind numbers, and unmeasured cells that hide measured ones."""
    order = [math.nan, math.inf, 5.0, 0.0, -math.inf]
    better = order[order.index(worst) :]
    values = np.array([[*better, 123.0]])
    missing = np.array([[False] * len(better) + [True]])

    pooled = max_pool(values, missing, 1)

    assert np.array_equal(pooled.values, [[worst]], equal_nan=True)
    assert not pooled.missing.any()


def test_pooling_refuses_an_empty_matrix() -> None:
    """Catches a picture of nothing."""
    with pytest.raises(ValueError, match="a matrix with cells"):
        max_pool(np.empty((0, 4)), np.empty((0, 4), bool))


@pytest.mark.parametrize(
    ("rows", "columns"), [(30, 30_000), (126, 4_096), (1, 100_000), (70_000, 3)], ids=str
)
def test_figure_stays_small(rows: int, columns: int) -> None:
    """Catches the browser's freeze on a long prompt: ≤ 200,000 cells and ≤ 2 MB, whatever the data."""
    values = np.random.default_rng(0).lognormal(-5, 3, (rows, columns))
    values[rows // 2, columns // 2] = 1e6
    figure = heatmap(make_grid(values, HOSTILE), Look("Relative error"))

    assert np.size(figure.data[0].z) <= MAX_CELLS <= 200_000
    assert len(figure.to_json()) <= 2_000_000
    assert any("1.00e6" in text for row in figure.data[0].text for text in row)


def test_every_column_is_its_own() -> None:
    """Catches equal tokens that Plotly would merge into one column."""
    trace = heatmap(make_grid(np.ones((2, 50))), Look("x")).data[0]

    assert len(set(trace.x)) == 50
    assert trace.text[0][4] == "1.00<br>prompt 11, token 7"


def test_axis_shows_token_text_escaped() -> None:
    """Catches prompt text that Plotly would take for markup."""
    figure = heatmap(make_grid(np.ones((1, 3)), '<b>&"'), Look("x"))

    assert set(figure.layout.xaxis.labelalias.values()) == {'&lt;b&gt;&amp;"'}


def color_at(figure: go.Figure, row: int, column: int) -> str:
    """Look a cell's color up as Plotly does."""
    trace = figure.data[0]
    share = (float(trace.z[row][column]) - trace.zmin) / (trace.zmax - trace.zmin)
    stops = [(place, color) for place, color in trace.colorscale if place <= share + 1e-6]
    return str(stops[-1][1])


def test_special_cells_have_colors_of_their_own() -> None:
    """Catches NaN, ∞, exact 0 and unmeasured cells that look like numbers."""
    values = np.array([[math.nan, math.inf, -math.inf, 0.0, 7.0, 1e-5, 1.0]])
    grid = make_grid(values)
    missing = np.zeros(values.shape, bool)
    missing[0, 4] = True
    figure = heatmap(TokenGrid(grid.scopes, grid.places, values, missing), Look("x"))

    colors = [color_at(figure, 0, j) for j in range(7)]
    assert len(set(colors)) == 7
    labels = figure.data[0].colorbar.ticktext
    assert {"NaN", "+∞", "−∞", "0 (exact)", "not measured"} <= set(labels)
    shown = [text.split("<br>")[0] for text in figure.data[0].text[0]]
    assert shown == ["NaN", "+∞", "−∞", "0", "not measured", "1.00e−5", "1.00"]


def test_bands_appear_only_when_needed() -> None:
    """Catches a legend of things that aren't on the picture."""
    values = np.array([[0.1, 1.0]])
    scale = log_scale(values, np.zeros(values.shape, bool))

    assert (scale.below, scale.above) == ((), ())
    assert scale.ticks()[1] == ["0.1", "1"]


def test_fixed_range_says_that_it_clamps() -> None:
    """Catches a color bar that claims its end is the largest value when cells lie beyond."""
    values = np.array([[1e-9, 0.1, 50.0]])
    scale = log_scale(values, np.zeros(values.shape, bool), (1e-4, 1.0))

    labels = scale.ticks()[1]
    assert (labels[0], labels[-1]) == ("≤ 1e−4", "≥ 1")


@example([0.0, -math.inf])
@given(some.lists(some.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=30))
def test_color_stops_are_valid_for_any_values(cells: list[float]) -> None:
    """Catches stops outside 0 … 1 or out of order, which Plotly refuses."""
    values = np.array([cells])
    scale = log_scale(values, np.zeros(values.shape, bool))
    places = [place for place, _ in scale.colors()]

    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, 1.0)
    assert np.isfinite(scale.place(values, np.zeros(values.shape, bool))).all()


def test_worst_cell_prefers_nan() -> None:
    """Catches a sentence that names the largest number while a NaN is on the picture."""
    assert make_grid(np.array([[1.0, 9.0], [math.nan, 2.0]])).worst_cell() == (1, 0)


def test_normalised_divides_by_the_layer() -> None:
    """Catches a division by the whole picture's largest, or by 0 in a bit-equal layer."""
    grid = make_grid(np.array([[1.0, 4.0], [0.0, 0.0], [10.0, 5.0]])).normalised()

    assert np.array_equal(grid.values, [[0.25, 1.0], [0.0, 0.0], [1.0, 0.5]])


def test_measured_only_drops_empty_columns() -> None:
    """Catches columns that lose their token when others are left out."""
    grid = make_grid(np.array([[1.0, 2.0, 3.0]]))
    missing = np.array([[True, False, True]])
    kept = TokenGrid(grid.scopes, grid.places, grid.values, missing).measured_only()

    assert [place.position for place in kept.places] == [4]
    assert np.array_equal(kept.values, [[2.0]])


def test_side_by_side_refuses_other_scopes() -> None:
    """Catches rows of one prompt that are shown under the names of another's."""
    with pytest.raises(ValueError, match="same scopes"):
        side_by_side([make_grid(np.ones((1, 2))), make_grid(np.ones((2, 2)))])


def test_prompts_are_parted_and_numbered() -> None:
    """Catches tokens of several prompts that look like one text, and a line at the wrong column."""
    grids = [make_grid(np.ones((2, n)), f"t{n}") for n in (3, 1, 4)]
    places = tuple(
        TokenPlace(number, j, j, "x")
        for number, g in enumerate(grids)
        for j in range(len(g.places))
    )
    joined = side_by_side(grids)
    figure = heatmap(TokenGrid(joined.scopes, places, joined.values, joined.missing), Look("x"))

    assert [shape.x0 for shape in figure.layout.shapes] == [2.5, 3.5]
    assert [(a.x, a.text) for a in figure.layout.annotations] == [
        (1, palette.ink("0")),
        (3, palette.ink("1")),
        (5.5, palette.ink("2")),
    ]
    assert "numbered on top" in figure.layout.xaxis.title.text


def test_one_prompt_is_not_parted() -> None:
    """Catches a number over a picture that has only one prompt."""
    figure = heatmap(make_grid(np.ones((2, 5))), Look("x"))

    assert (figure.layout.shapes, figure.layout.annotations) == ((), ())
    assert figure.layout.xaxis.title.text == "token"


def test_place_that_broke_is_framed_and_named_in_red() -> None:
    """Catches a frame around the layer beside the one that broke."""
    figure = heatmap(make_grid(np.ones((4, 5))), Look("x"), marked="layers.2")

    assert {(shape.y0, shape.y1) for shape in figure.layout.shapes} == {(1.5, 2.5)}
    labels = figure.layout.yaxis.labelalias
    assert labels["layers.2"] == palette.ink("<b>L2</b>", palette.CULPRIT)
    assert labels["layers.3"] == "L3"
