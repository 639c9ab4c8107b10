"""Where values stop being finite, whose error it is, and what a metric is: pure functions."""

import math
import time

import numpy as np
import plotly.graph_objects as go
import pytest

from quantwatch.domain import RunResult
from quantwatch.metrics.registry import METRICS
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.births import MAX_POINTS, birth_map
from quantwatch_dashboard.charts.blame import blame_chart
from quantwatch_dashboard.charts.layers import layer_chart
from quantwatch_dashboard.components.blame import blame_table
from quantwatch_dashboard.components.explain import sentence, term
from quantwatch_dashboard.logic import series
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.logic.lines import Blamed, LayerLine
from quantwatch_dashboard.logic.nonfinite import Birth, births_of, prompt_birth

SCOPES = ("layers.10", "layers.2.mlp", "embedding")


def grid_of(
    values: list[list[float]], scopes: tuple[str, ...] = SCOPES, prompt: int = 0
) -> TokenGrid:
    numbers = np.array(values)
    places = tuple(TokenPlace(prompt, j, j, "x") for j in range(numbers.shape[1]))
    return TokenGrid(scopes, places, numbers, np.zeros(numbers.shape, bool))


def test_birth_is_the_first_place_in_forward_order() -> None:
    """Catches the first row of the matrix (layers.10) that is taken for the first place."""
    nan, inf = math.nan, math.inf
    found = births_of([grid_of([[nan, 1, nan], [inf, 1, 1], [1, 1, 1]])])

    assert [(b.place.position, b.scope, b.kind) for b in found.earliest(9)] == [
        (0, "layers.2.mlp", "+∞"),
        (2, "layers.10", "NaN"),
    ]
    assert [b.place.position for b in found.earliest(1)] == [0]


def test_unmeasured_cells_are_not_born() -> None:
    """Catches cells that were not measured, which decode to NaN, as births."""
    grid = grid_of([[math.nan], [1], [1]])
    hidden = TokenGrid(grid.scopes, grid.places, grid.values, np.array([[True], [False], [False]]))

    assert len(births_of([hidden])) == 0
    assert len(births_of([])) == 0
    assert prompt_birth(births_of([hidden])) is None


def test_output_alone_is_told_after_all_taps() -> None:
    """Catches an output that is not finite while every tap is, and one that hides its tap."""
    output = grid_of([[math.nan, math.nan]], ("model",))
    found = births_of([grid_of([[1, math.nan], [1, 1], [1, 1]]), output])

    assert [(b.place.position, b.scope) for b in found.earliest(9)] == [
        (1, "layers.10"),
        (0, "model"),
    ]


def test_a_place_in_two_matrices_is_born_once() -> None:
    """Catches a token that is counted per matrix, and the later of its two places."""
    nan = math.nan
    one, two = grid_of([[1, nan], [1, 1], [1, 1]]), grid_of([[nan, 1], [1, nan], [1, 1]])
    found = births_of([one, two])

    assert {b.place.position: b.scope for b in found.earliest(9)} == {
        0: "layers.10",
        1: "layers.2.mlp",
    }


def test_a_prompt_that_is_nan_everywhere_is_quick() -> None:
    """Catches a loop, and an object, per token: 30,000 of them in each of 256 prompts."""
    grid = grid_of([[math.nan] * 30_000] * 90, tuple(f"layers.{i}" for i in range(90)))
    begin = time.process_time()
    found = births_of([grid])

    assert len(found) == 30_000
    assert time.process_time() - begin < 0.5
    assert [b.scope for b in found.earliest(2)] == ["layers.0", "layers.0"]


def test_prompts_are_told_by_their_first() -> None:
    """Catches the first token instead of the first place, and prompts that are mixed up."""
    nan = math.nan
    one = births_of([grid_of([[nan, 1], [1, nan], [1, 1]])])
    two = births_of([grid_of([[nan, 1], [1, 1], [1, 1]], prompt=1)])
    found = [prompt_birth(births) for births in (one, two)]

    assert [(p.first.place.prompt, p.first.scope, p.num_tokens) for p in found if p] == [
        (0, "layers.2.mlp", 2),
        (1, "layers.10", 1),
    ]


def birth(position: int, scope: str, value: float = math.nan) -> Birth:
    return Birth(TokenPlace(0, position, position, "<b>x</b>"), scope, value)


def test_birth_map_rings_the_first_and_escapes() -> None:
    """Catches a ring around the first token instead of the first place, and markup in a hover."""
    scopes = ["embedding", "layers.0", "layers.1"]
    figure = birth_map([birth(0, "layers.1"), birth(5, "layers.0", math.inf)], scopes, 8)
    ring = figure.data[-1]

    assert (ring.x[0], ring.y[0]) == (5, 1)
    assert ring.marker.color == palette.CULPRIT
    assert "&lt;b&gt;" in figure.data[0].text[0]
    assert {trace.name for trace in figure.data if trace.showlegend is not False} >= {"NaN", "+∞"}


def test_birth_map_of_a_long_prompt_stays_small() -> None:
    """Catches 30,000 markers, and the earliest place among those that are left out."""
    births = [birth(j, "layers.1") for j in range(30_000)] + [birth(29_999, "layers.0")]
    figure = birth_map(births, ["layers.0", "layers.1"], 30_000)

    assert sum(len(trace.x) for trace in figure.data[:3]) == MAX_POINTS
    assert figure.data[-1].x[0] == 29_999
    assert len(figure.to_json()) <= 2_000_000


def test_birth_map_of_nothing_is_refused() -> None:
    """Catches a picture of nothing."""
    with pytest.raises(ValueError, match="at least one"):
        birth_map([], ["embedding"], 4)


def test_blame_has_both_errors_of_each_place(planted: RunResult) -> None:
    """Catches the wrong error on an axis: the planted layer is the one far to the right."""
    found = series.blamed(planted, "int8-fault")
    fault = next(one for one in found if one.strong)

    assert [one.name for one in found] == ["bf16", "int8", "int4-g64", "int8-fault"]
    assert fault.culprit is not None
    assert fault.places[fault.culprit] == "layers.14"
    row = planted.candidates[3].find("isolated_error", "layers.14")
    assert row is not None
    assert fault.isolated[fault.culprit] == row.mean
    figure = blame_chart(found, "layers.3")
    assert figure.data[3].name == "int8-fault"
    assert figure.layout.annotations[0].text == palette.ink("<b>L14</b>", palette.CULPRIT)
    assert figure.data[-1].marker.color == palette.CHOSEN


def test_blame_of_zeros_and_nan_is_drawn() -> None:
    """Catches a logarithm of nothing."""
    one = Blamed(
        "a", 0, ["x", "y", "z"], [0.0, math.nan, None], [math.inf, 0.0, 1.0], strong=True, culprit=0
    )
    figure = blame_chart([one])

    assert len(figure.data[0].x) == 2
    assert all(
        isinstance(v, float) and math.isfinite(v) for v in (*figure.data[0].x, *figure.data[0].y)
    )
    assert isinstance(blame_chart([]), go.Figure)


def test_blame_table_leads_with_nan_and_marks_the_culprit() -> None:
    """Catches NaN that sorts behind every number, and names that are rendered."""
    one = Blamed("<b>a", 0, ["x", "y", "z"], [0.1, math.nan, 0.3], [1.0, 2.0, 3.0], culprit=2)
    shown = blame_table(one, "01J")

    assert shown.index(">y<") < shown.index(">z<") < shown.index(">x<")
    assert shown.count("qw-marked") == 3
    assert "<b>a" not in shown


def test_headroom_is_drawn_on_a_linear_axis() -> None:
    """Catches 100 to 130 bits between two decades, and an infinity that stretches the axis."""
    lines = [LayerLine("a", 0, [120.0, math.inf, 125.0])]
    figure = layer_chart(
        lines, ["layers.0", "layers.1", "layers.2"], unit="Headroom, bits", is_log=False
    )

    assert figure.layout.yaxis.type == "linear"
    assert "NaN, ∞" in figure.layout.yaxis.ticktext
    assert max(figure.data[0].y) < 130


@pytest.mark.parametrize("slug", METRICS)
def test_every_metric_is_explained(slug: str) -> None:
    """Catches a metric without a sentence, or one that says a unit of 1."""
    said = sentence(slug)

    assert said.startswith(METRICS[slug].title)
    assert "In 1." not in said
    assert said.endswith(".")


def test_unknown_metric_is_its_own_name() -> None:
    """Catches an exception on a run that another version measured."""
    assert sentence("new_metric") == ""
    assert term("<new>") == "<span>&lt;new&gt;</span>"


@pytest.mark.parametrize(
    ("name", "short"),
    [("layers.14", "L14"), ("layers.14.mlp.down_proj", "L14 mlp.down_proj"), ("head", "head"),
     ("layers.0 … layers.3", "L0  … L3")],
)  # fmt: skip
def test_short_names_of_scopes(name: str, short: str) -> None:
    """Catches a label that is longer than the picture is wide."""
    assert text.scope(name) == short


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.5, "+0.5000"), (-0.5, "−0.5000"), (0.0, "0"), (math.nan, "NaN"), (math.inf, "+∞")],
)
def test_differences_have_a_sign(value: float, said: str) -> None:
    """Catches a difference whose direction is lost, and two signs before ∞."""
    assert text.signed(value) == said
