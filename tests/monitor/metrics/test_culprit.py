"""The culprit: whose fault it is, as a name and as a sentence."""

import math
from dataclasses import replace

import numpy as np
import pytest

from quantwatch.domain import HEAD, Culprit, Measurement, NonFinite, Scope
from quantwatch.metrics.culprit import find_culprit, first_difference, rank_layers
from quantwatch.metrics.statistics import PromptValues, summarize


def measured(metric: str, scope: str, *values: float) -> Measurement:
    part = PromptValues(0, np.array(values), np.arange(len(values)))
    return summarize(metric, Scope(scope), [part], worst="max", method="all positions")


def isolated(**scopes: float) -> list[Measurement]:
    return [measured("isolated_error", s.replace("__", "."), v) for s, v in scopes.items()]


EVERYWHERE = {
    "embedding": 0.0, "final_norm": 0.0, "head": 0.0,
    "layers__0": 0.010, "layers__0__attention": 0.009, "layers__0__mlp": 0.011, "layers__0__mlp__down_proj": 0.008,
    "layers__1": 0.012, "layers__1__attention": 0.010, "layers__1__mlp": 0.012, "layers__1__mlp__down_proj": 0.009,
    "layers__2": 0.200, "layers__2__attention": 0.010, "layers__2__mlp": 0.250, "layers__2__mlp__down_proj": 0.240,
}  # fmt: skip


def culprit_of(changes: dict[str, float], **options: object) -> Culprit:
    return find_culprit(isolated(**{**EVERYWHERE, **changes}), floor={}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "scope"),
    [
        pytest.param({}, "layers.2.mlp.down_proj", id="down-to-the-linear"),
        pytest.param({"layers__2__mlp__down_proj": 0.0}, "layers.2.mlp", id="mlp-without-its-linear"),
        pytest.param(
            {"layers__2__mlp__down_proj": 0.0, "layers__2__mlp": 0.0, "layers__2__attention": 0.0},
            "layers.2",
            id="a-layer's-own-norm",
        ),
        pytest.param({"head": 0.9}, "head", id="head"),
        pytest.param({"embedding": 0.9}, "embedding", id="embedding"),
        pytest.param({"layers__1__attention": math.nan, "layers__1": math.nan}, "layers.1.attention", id="nan"),
    ],
)  # fmt: skip
def test_the_finest_scope_is_named(changes: dict[str, float], scope: str) -> None:
    """Catches blaming a clean sibling, a whole layer for one linear, or skipping NaN as 'not greater'."""
    assert culprit_of(changes).scope == scope


def test_nothing_beyond_the_floor_is_nobody() -> None:
    """Catches rounding noise that is called a culprit."""
    floor = {("isolated_error", s.replace("__", ".")): 1.0 for s in EVERYWHERE}
    found = find_culprit(isolated(**EVERYWHERE), floor=floor)
    assert found.scope is None
    assert "noise floor" in found.words


def test_nothing_measured_is_not_nothing_wrong() -> None:
    """Catches "beyond no noise floor" where no isolated error was taken."""
    found = find_culprit([measured("rel_error", "layers.0", 0.1)], floor={})
    assert found.scope is None
    assert found.words.startswith("No isolated error was measured")


def test_bit_equal_models_are_said_to_be() -> None:
    """Catches a culprit on identical models."""
    assert find_culprit((), floor={}, bit_equal=True).words.startswith("Bit-equal")


def test_the_first_difference_is_in_forward_order() -> None:
    """Catches the largest difference being taken for the first."""
    taps = [
        measured("rel_error", "embedding", 0.0, 0.0),
        measured("rel_error", "layers.0", 0.0, 1e-9),
        measured("rel_error", "layers.1", 0.5),
    ]
    assert first_difference(taps) == "layers.0"
    assert first_difference(taps[:1]) is None
    assert first_difference([measured("rel_error", "embedding", math.nan)]) == "embedding"


def test_head_only_faults_say_which_rows() -> None:
    """Catches layer 0 blamed for the head (competitors.md, trap 1)."""
    zeros = dict.fromkeys(EVERYWHERE, 0.0)
    found = find_culprit(isolated(**{**zeros, "head": 0.01}), floor={}, head_rows=(260, 281, 284))
    assert found.scope == HEAD
    assert found.head_rows == (260, 281, 284)
    assert (
        "Hidden states equal through final_norm; head differs in rows 260, 281, 284" in found.words
    )


def test_non_finite_values_lead_the_sentence() -> None:
    """Catches a NaN run explained by a finite number."""
    at = NonFinite(Scope("layers.12.attention"), 0, 0)
    words = culprit_of({}, first_nonfinite=at).words
    assert words.startswith("First non-finite value: layers.12.attention, prompt 0, position 0.")


def test_layers_rank_worst_first() -> None:
    """Catches a mean over layers that hides the one that matters."""
    rows = isolated(**EVERYWHERE)
    assert [scope for scope, _ in rank_layers(rows)] == ["layers.2", "layers.1", "layers.0"]
    broken = [replace(rows[3], n_nan=1), *rows[4:]]
    assert rank_layers(broken)[0] == ("layers.0", math.inf)


@pytest.mark.parametrize(("value", "ordinary"), [(0.0099, True), (0.026, True), (0.03, False)])
def test_the_largest_of_many_alike_is_no_outlier(value: float, ordinary: bool) -> None:
    """Catches an ordinary quantization whose largest error reads like a fault."""
    plain = {f"layers__{i}__mlp": 0.01 for i in range(4)} | {f"layers__{i}": 0.01 for i in range(4)}
    plain |= {"layers__1": 0.05, "layers__1__mlp": value}
    words = find_culprit(isolated(**plain), floor={}).words
    assert words.startswith("layers.1.mlp: isolated error")
    assert ("none stands out" in words) is ordinary
