"""Scales beside the one for errors, and differences: signed, symmetric, honest about what has none."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from numpy.typing import NDArray

from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.heatmap import Chosen, Look, heatmap
from quantwatch_dashboard.charts.scale import bits_scale, change_scale, scale_for
from quantwatch_dashboard.logic.cells import Kind, value_text
from quantwatch_dashboard.logic.difference import aligned, loss, ratio
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.logic.pooling import max_pool

KINDS: tuple[Kind, ...] = ("log", "bits", "ratio", "bits change")


def none(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.zeros(values.shape, bool)


def grid_of(*rows: list[float], first: int = 0) -> TokenGrid:
    values = np.array(rows)
    places = tuple(TokenPlace(0, first + j, j, "x") for j in range(values.shape[1]))
    return TokenGrid(tuple(f"layers.{i}" for i in range(len(rows))), places, values, none(values))


def test_little_headroom_is_bright() -> None:
    """Catches a scale on which the layer that is about to overflow looks like the best one."""
    values = np.array([[0.0, 16.0]])
    scale = bits_scale(values, none(values), (0.0, 16.0))

    gradient = [color for place, color in scale.colors() if 0 <= place <= 1]
    assert gradient[0] == palette.INFERNO[-1]
    assert gradient[-1] == palette.INFERNO[0]
    assert scale.ticks()[1][0] == "0"


def test_headroom_of_wide_dtypes_says_that_it_is_clamped() -> None:
    """Catches 120 bits of bfloat16 that are said to be 16."""
    values = np.array([[120.0, 121.5]])
    assert bits_scale(values, none(values), (0.0, 16.0)).ticks()[1][-1] == "≥ 16"
    assert bits_scale(values, none(values)).ticks()[1] == ["120", "121", "122"]


def test_pooled_headroom_keeps_the_smallest() -> None:
    """Catches a pooled picture on which the one overflow (−∞ bits) is hidden by plenty of room."""
    values = np.array([[9.0, 3.0, math.inf, 5.0, -math.inf, 7.0]])
    pooled = max_pool(values, none(values), 3, lowest=True)

    assert pooled.values.tolist() == [[3.0, 5.0, -math.inf]]
    assert grid_of([9.0, 3.0, -math.inf]).worst_cell(lowest=True) == (0, 2)


@pytest.mark.parametrize("reach", [0.4, 1.0, 3.0, 5.0, 17.0], ids=str)
def test_change_is_symmetric_around_equal(reach: float) -> None:
    """Catches a scale whose white is not "equal", by which better and worse look alike."""
    values = np.array([[-0.1, reach]])
    scale = change_scale(values, none(values), ratio=True)
    places, labels = scale.ticks()

    assert scale.low == -scale.high
    assert scale.high >= reach
    assert places[labels.index("equal")] == 0
    assert len(palette.CHANGE) % 2 == 1


def test_change_says_factors_and_bits() -> None:
    """Catches logarithms on a color bar, which nobody reads."""
    values = np.array([[-2.0, 2.0]])
    assert "× 4" in change_scale(values, none(values), ratio=True).ticks()[1]
    assert "÷ 4" in change_scale(values, none(values), ratio=True).ticks()[1]
    assert "+2" in change_scale(values, none(values), ratio=False).ticks()[1]


@pytest.mark.parametrize("kind", KINDS)
@given(some.lists(some.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20))
def test_any_values_have_a_color(kind: Kind, cells: list[float]) -> None:
    """Catches stops out of order or a cell beyond the color axis, which Plotly draws as nothing."""
    values = np.array([cells])
    scale = scale_for(kind, values, none(values))
    places = [place for place, _ in scale.colors()]
    low, high = scale.bounds

    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, 1.0)
    drawn = scale.place(values, none(values))
    assert (
        (drawn >= np.float32(low) - abs(low) * 1e-6) & (drawn <= high * (1 + 1e-6) + 1e-6)
    ).all()


RATIOS = {
    "double": (2.0, 1.0, 1.0),
    "half": (1.0, 2.0, -1.0),
    "equal": (0.3, 0.3, 0.0),
    "both exact": (0.0, 0.0, 0.0),
    "was exact": (1e-9, 0.0, math.inf),
    "became exact": (0.0, 1e-9, -math.inf),
    "became NaN": (math.nan, 1.0, math.inf),
    "became ∞": (math.inf, 1.0, math.inf),
    "NaN no more": (1.0, math.nan, -math.inf),
    "NaN in both": (math.nan, math.nan, math.nan),
    "∞ in both": (math.inf, math.inf, math.nan),
}


@pytest.mark.parametrize(("now", "before", "wanted"), RATIOS.values(), ids=RATIOS)
def test_ratio(now: float, before: float, wanted: float) -> None:
    """Catches a sign the wrong way round, 0 ÷ 0 as NaN, and a new NaN that looks like nothing."""
    found = ratio(grid_of([now]), grid_of([before])).values[0, 0]

    assert found == wanted or (math.isnan(found) and math.isnan(wanted))


def test_less_headroom_is_worse() -> None:
    """Catches headroom whose loss is blue."""
    assert loss(grid_of([3.0, 9.0, -math.inf]), grid_of([5.0, 8.0, 4.0])).values.tolist() == [
        [2.0, -1.0, math.inf]
    ]


def test_differences_are_of_the_same_tokens() -> None:
    """Catches columns that are shifted where the two runs read other tokens in addition."""
    now, before = grid_of([1.0, 2.0, 3.0]), grid_of([20.0, 30.0, 40.0], first=1)
    left, right = aligned(now, before)

    assert [place.position for place in left.places] == [1, 2]
    assert left.values.tolist() == [[2.0, 3.0]]
    assert right.values.tolist() == [[20.0, 30.0]]


def test_unmeasured_in_either_run_has_no_difference() -> None:
    """Catches a difference against a cell that was never read."""
    now = grid_of([1.0, 2.0])
    before = TokenGrid(now.scopes, now.places, now.values, np.array([[True, False]]))

    assert ratio(now, before).missing.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (0.0123, "log", "0.0123"),
        (11.5, "bits", "11.5 bits"),
        (1.0, "ratio", "× 2"),
        (-1.5, "ratio", "÷ 2.83"),
        (2000.0, "ratio", "× 2^2000"),
        (0.0, "ratio", "equal"),
        (2.5, "bits change", "2.50 bits less"),
        (-2.5, "bits change", "2.50 bits more"),
        (math.nan, "ratio", "not finite in both"),
    ],
    ids=str,
)
def test_cells_in_words(value: float, kind: Kind, said: str) -> None:
    """Catches a hover that says a logarithm or loses the direction."""
    assert value_text(value, kind) == said


@pytest.mark.parametrize(("rows", "columns"), [(30, 100), (30, 2_000)], ids=["cells", "edges"])
def test_every_token_and_layer_can_be_clicked(rows: int, columns: int) -> None:
    """Catches a picture of which some token or layer can't be reached, or with too many markers."""
    figure = heatmap(grid_of(*([1.0] * columns for _ in range(rows))), Look("x"), chosen=Chosen())
    data = figure.data[1].customdata

    assert len(data) <= 5_000
    assert {row[0] for row in data} == {f"layers.{i}" for i in range(rows)}
    # A pooled column stands for its first token; the zoomed picture has each of them.
    assert len({row[2] for row in data}) == len(figure.data[0].x)
    assert len(figure.to_json()) <= 2_000_000
    # Of lists Plotly looks at each element, several times: a third of the page's time.
    drawn = figure.data[1]
    assert all(isinstance(each, np.ndarray) for each in (drawn.x, drawn.y, drawn.text, data))


def test_choice_is_framed() -> None:
    """Catches a frame around the neighbor of what was chosen."""
    grid = grid_of([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    figure = heatmap(grid, Look("x"), chosen=Chosen("layers.1", (0, 2)))
    boxes = [s for s in figure.layout.shapes if s.line.color == palette.CHOSEN]

    assert [(b.x0, b.x1, b.y0, b.y1) for b in boxes] == [
        (-0.5, 2.5, 0.5, 1.5),
        (1.5, 2.5, -0.5, 1.5),
    ]


def test_stretch_is_framed_on_the_pooled_overview() -> None:
    """Catches a frame at the token's number where a column stands for several tokens."""
    grid = grid_of(*([1.0] * 3_000 for _ in range(30)))
    figure = heatmap(grid, Look("x"), chosen=Chosen(stretch=(1_500, 1_799)))
    (box,) = [s for s in figure.layout.shapes if s.line.color == palette.CHOSEN]
    per_column = 3_000 / len(figure.data[0].x)

    assert box.x0 == pytest.approx(1_500 / per_column, abs=1.5)
    assert box.x1 == pytest.approx(1_799 / per_column, abs=1.5)
