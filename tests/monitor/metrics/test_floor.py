"""The noise floor: the largest departure of the reference from itself."""

import numpy as np
import pytest

from quantwatch.domain import Observation, Scope, TokenMatrix
from quantwatch.metrics.floor import NoiseFloor
from quantwatch.metrics.registry import METRICS

LAYER, OTHER = Scope("layers.0"), Scope("layers.1")


def _seen(*matrices: TokenMatrix) -> NoiseFloor:
    floor = NoiseFloor()
    for prompt, matrix in enumerate(matrices):
        floor.observe(Observation("reference", prompt, (matrix,)))
    return floor


def test_the_floor_is_the_largest_departure() -> None:
    """Catches a floor taken from the mean, or one that takes a cosine's 1 for noise."""
    cosine = TokenMatrix("cosine", (LAYER,), np.array([[1.0, 1.0 - 1e-9, 1.0, 1.0]]))
    error = TokenMatrix("rel_error", (LAYER, OTHER), np.array([[0.0, 3e-6], [1e-6, 0.0]]))
    later = TokenMatrix("rel_error", (LAYER, OTHER), np.array([[1e-7], [2e-6]]))
    floor = _seen(cosine, error, later).values
    assert floor["cosine", LAYER] == pytest.approx(1e-9, rel=1e-6)
    assert floor["rel_error", LAYER] == 3e-6
    assert floor["rel_error", OTHER] == 2e-6


@pytest.mark.parametrize(
    ("metric", "tie", "expected"),
    [("router_overlap", 0.5, 0.05), ("router_weight_l1", 2.0, 0.2), ("router_flips", 1.0, 0.1)],
)
def test_one_tie_of_a_router_is_no_wide_floor(metric: str, tie: float, expected: float) -> None:
    """Catches a floor of one token's jump, three of which no mean over tokens can ever exceed."""
    best = METRICS[metric].best_value
    parts = np.full((1, 4), best), np.full((1, 6), best)
    parts[1][0, 2] = tie
    floor = _seen(*(TokenMatrix(metric, (LAYER,), part) for part in parts))
    assert floor.values == {(metric, LAYER): pytest.approx(expected)}


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("sqnr_db", [np.inf, 120.0]),
        ("max_abs", [1.0, 2.0]),
        ("nll_candidate", [3.0, 4.0]),
        ("rel_error", [np.nan, np.inf]),
    ],
    ids=["no finite best value", "neutral", "of one model", "nothing finite"],
)
def test_what_has_no_floor(metric: str, values: list[float]) -> None:
    """Catches noise read from what doesn't compare, or from a broken value."""
    assert not _seen(TokenMatrix(metric, (LAYER,), np.array([values]))).values


def test_extras_are_not_noise() -> None:
    """Catches the shown-only worst positions in the floor."""
    extra = TokenMatrix("lens_kl", (LAYER,), np.array([[1.0]]), np.array([3]), "extra")
    assert not _seen(extra).values


def test_the_floor_is_the_largest_of_all_conditions() -> None:
    """Catches a floor of the last condition alone, and bit-equal ones that are not kept as 0."""
    floor = NoiseFloor()
    for source, error in (("reference", 2e-6), ("threads", 0.0), ("attention", 5e-6)):
        matrix = TokenMatrix("rel_error", (LAYER,), np.array([[error, 0.0]]))
        floor.observe(Observation(source, 0, (matrix,)))
    assert floor.values == {("rel_error", LAYER): 5e-6}
    assert floor.by_source["threads"] == {("rel_error", LAYER): 0.0}
    assert floor.by_source["reference"] == {("rel_error", LAYER): 2e-6}
