"""Observers: what a range depends on, and what it must not depend on."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.quantize.observers import (
    HistogramObserver,
    MovingAverageObserver,
    make_observer,
    tensor_qparams,
)

UINT8 = INT_FORMATS["uint8"]
NAMES = ["minmax", "moving_average", "histogram", "mse", "percentile"]
ORDERLESS = ["minmax", "histogram", "mse", "percentile"]


def observed(name: Any, batches: Sequence[Tensor], fmt: Any = UINT8) -> tuple[float, float]:
    observer = make_observer(name)
    for batch in batches:
        observer.update(batch)
    return observer.range(fmt)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_changes_nothing(name: str) -> None:
    """Catches min and max of nothing, and an average that counts it (bug log 20)."""
    batches = [torch.randn(8, 4), torch.randn(8, 4)]
    with_empty = [torch.empty(0, 4), batches[0], torch.empty(0, 4), batches[1]]
    assert observed(name, with_empty) == observed(name, batches)


@pytest.mark.parametrize("name", NAMES)
def test_never_observed_is_an_error(name: str) -> None:
    """Catches a range 0 … 0 or ±inf that nobody measured."""
    with pytest.raises(ValueError, match="never reached"):
        observed(name, [torch.empty(0, 3)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_an_error(name: Any, bad: float) -> None:
    """Catches a NaN that min and max skip, and an infinite scale (bug log 39)."""
    observer = make_observer(name)
    observer.update(torch.ones(2, 2))
    with pytest.raises(ValueError, match="1 of 4 calibration activations are not finite"):
        observer.update(torch.tensor([[1.0, bad], [2.0, 3.0]]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERLESS)
@given(seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_neither_order_nor_batches_matter(name: str, seed: int) -> None:
    """Catches observers that keep the last batch, or whose bins depend on the first (bug log 37)."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp(3 * torch.randn(6, generator=generator))
    batches = [s * torch.randn(5, 4, generator=generator) for s in scales]
    shuffled = [row[None] for batch in batches for row in batch]
    random.Random(seed).shuffle(shuffled)
    assert observed(name, shuffled) == observed(name, batches)
    assert observed(name, [torch.cat(batches)]) == observed(name, batches)


def test_moving_average_starts_with_the_first_batch() -> None:
    """Catches an average from 0 (0.654), and 0.95 on the new value (kernel_anchors 2.1, 5)."""
    batches = [torch.tensor([-0.5, v]) for v in (1.0, 1.0, 1.0, 10.0, 1.0)]
    low, high = observed("moving_average", batches)
    assert high == pytest.approx(1 + 9 * 0.05 * 0.95, rel=1e-12)
    assert low == pytest.approx(-0.5)


def test_a_partial_last_batch_weighs_what_it_holds() -> None:
    """Catches a last batch of size 1 that counts like a full one (bug log 37)."""
    full, last = torch.ones(64, 2), torch.full((1, 2), 100.0)
    high = observed("moving_average", [full, last])[1]
    kept = 0.95 ** (1 / 64)
    assert high == pytest.approx(kept + (1 - kept) * 100, rel=1e-12)
    assert high < 1.1
    # The same values in four pieces forget as fast as in one.
    pieces = [full, *torch.full((64, 2), 3.0).chunk(4)]
    whole = [full, torch.full((64, 2), 3.0)]
    assert observed("moving_average", pieces)[1] == pytest.approx(
        observed("moving_average", whole)[1]
    )


@pytest.mark.parametrize("sizes", [(8, 512, 512, 512, 512, 512), (1, 2, 4, 8, 16, 32)], ids=str)
def test_a_short_first_batch_does_not_make_it_forget(sizes: tuple[int, ...]) -> None:
    """Catches 0.95^64 on the old value because the first prompt was short (bug log 37)."""
    values = (1.0, 10.0, 10.0, 10.0, 10.0, 2.0)
    batches = [torch.full((n,), v) for n, v in zip(sizes, values, strict=True)]
    expected = values[0]
    for value in values[1:]:  # each is as large as the largest before it, or larger
        expected = 0.95 * expected + 0.05 * value
    assert observed("moving_average", batches)[1] == pytest.approx(expected, rel=1e-12)


def test_zero_is_included_afterwards() -> None:
    """Catches a range 3 … 4 whose zero point would be clamped (llm-awq#193)."""
    low, high = observed("moving_average", [torch.tensor([3.0, 4.0])])
    assert (low, high) == (3.0, 4.0)
    made = tensor_qparams(low, high, UINT8)
    assert made.zeros is not None
    assert made.zeros.item() == 0
    assert made.scales.item() == pytest.approx(4 / 255)


def test_symmetric_scale() -> None:
    made = tensor_qparams(-3.0, 2.0, INT8)
    assert made.zeros is None
    assert made.scales.item() == pytest.approx(3 / 127)


def test_zeros_have_scale_one() -> None:
    """Catches 0/0 behind a layer whose inputs are all zero (bug log 3)."""
    for name in NAMES:
        made = tensor_qparams(*observed(name, [torch.zeros(4, 4)]), UINT8)
        assert made.scales.item() == 1


def test_percentile_leaves_out_one_of_ten_thousand() -> None:
    """Catches a percentile that is a maximum; the bins are fine enough to hit it within 0.1 %."""
    x = torch.linspace(0, 1, 100_001)
    x[-1] = 50.0
    low, high = observed("percentile", [x])
    assert high == pytest.approx(0.9999, rel=0.01)
    assert low == pytest.approx(0.0001, abs=0.01)


def squared_error(x: Tensor, ends: tuple[float, float], fmt: Any = UINT8) -> float:
    made = tensor_qparams(*ends, fmt)
    scale, zero = made.scales.double(), 0 if made.zeros is None else made.zeros.double()
    codes = ((x.double() / scale).round() + zero).clamp(fmt.qmin, fmt.qmax)
    return float(((codes - zero) * scale - x).square().mean())


@pytest.mark.parametrize("name", ["histogram", "mse"])
@pytest.mark.parametrize("fmt", [INT_FORMATS["uint4"], INT_FORMATS["int4"]], ids=["uint4", "int4"])
def test_error_minimizing_ranges_beat_the_whole_range(name: str, fmt: Any) -> None:
    """Catches a search that only returns the whole range, and one that forgets clipping."""
    x = torch.cat([torch.randn(50_000), torch.tensor([9.0, -6.0])])
    found = squared_error(x, observed(name, [x], fmt), fmt)
    best = min(
        squared_error(x, (-6.0 * f, 9.0 * f), fmt) for f in torch.linspace(0.05, 1, 200).tolist()
    )
    assert found < 0.7 * squared_error(x, (-6.0, 9.0), fmt)
    assert found <= 1.02 * best


def test_bins_grow_with_an_outlier_of_any_size() -> None:
    observer = HistogramObserver("percentile")
    for value in (0.0, 1e-30, -1e-3, 5.0, -3e38):
        observer.update(torch.tensor([value]))
    assert observer.range(UINT8)[0] == pytest.approx(-3e38, rel=1e-3)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="unknown observer 'last'; allowed are minmax, "):
        make_observer("last")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight lies in"):
        MovingAverageObserver(1.0)
