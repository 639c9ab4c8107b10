"""Statistics of hidden states."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from quantwatch_kernels.compare.tap import (
    TapNorms,
    feature_kl,
    isolated_error,
    row_norm,
    statistics_of,
    tap_norms,
    tap_statistics,
)
from quantwatch_kernels.registry import prefer
from quantwatch_kernels.testing import VIEWS, assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def states(dtype: torch.dtype, drift: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    h = scale * torch.randn(40, 96)
    return h.to(dtype), (h + drift * scale * torch.randn(40, 96)).to(dtype)


@pytest.mark.parametrize("drift", [1e-6, 0.01, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_numpy(dtype: torch.dtype, drift: float) -> None:
    """Catches sums in the tap's own dtype."""
    h, other = states(dtype, drift)
    a, b = h.double().numpy(), other.double().numpy()
    norm, gap = np.linalg.norm(a, axis=1), np.linalg.norm(a - b, axis=1)
    cosine = (a * b).sum(1) / norm / np.linalg.norm(b, axis=1)
    with np.errstate(divide="ignore"):
        expected = (gap / norm, 20 * np.log10(norm / gap), cosine, np.abs(b).max(1))
    for value, truth in zip(tap_statistics(h, other), expected, strict=True):
        assert_close(value, torch.from_numpy(truth), rtol=1e-12, atol=1e-15)
    with prefer("reference"):
        twin = tap_statistics(h, other)
    for value, truth_twin in zip(tap_statistics(h, other), twin, strict=True):
        assert_close(value, truth_twin, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_is_exact(dtype: torch.dtype) -> None:
    """Catches a cosine of 1 − 1e-16 and an SQNR of 300 dB between identical states."""
    h, _ = states(dtype, 0)
    result = tap_statistics(h, h.clone())
    assert set(result.rel_error.tolist()) == {0.0}
    assert set(result.sqnr_db.tolist()) == {math.inf}
    assert set(result.cosine.tolist()) == {1.0}


def test_small_angles_keep_their_digits() -> None:
    """Catches 1 − cosine lost in rounding: here it is 5e-15 and must be right to 1 %."""
    h = torch.zeros(1, 4)
    h[0, 0] = 1
    other = h.clone()
    other[0, 1] = 1e-7
    assert 1 - tap_statistics(h, other).cosine.item() == pytest.approx(5e-15, rel=0.03)


EDGES = {
    "both-zero": ([0.0, 0.0], [0.0, 0.0], (0.0, math.inf, 1.0, 0.0)),
    "reference-zero": ([0.0, 0.0], [3.0, 4.0], (math.inf, -math.inf, 0.0, 4.0)),
    "candidate-zero": ([3.0, 4.0], [0.0, 0.0], (1.0, 0.0, 0.0, 0.0)),
    "opposite": ([3.0, 4.0], [-3.0, -4.0], (2.0, -20 * math.log10(2), -1.0, 4.0)),
    "bf16-huge": ([1e30, 0.0], [0.0, 1e30], (math.sqrt(2), -10 * math.log10(2), 0.0, 1e30)),
    "fp16-range": ([6e4, 6e4], [6e4, -6e4], (math.sqrt(2), -10 * math.log10(2), 0.0, 6e4)),
    "nan": ([math.nan, 0.0], [1.0, 0.0], (math.nan, math.nan, math.nan, 1.0)),
    "inf-in-candidate": ([1.0, 0.0], [math.inf, 0.0], (math.inf, -math.inf, math.nan, math.inf)),
}


@pytest.mark.parametrize("case", EDGES)
def test_edges(case: str) -> None:
    """Catches 0/0 = NaN, squares that overflow, and a NaN row that spreads to its neighbours."""
    h, other, expected = EDGES[case]
    both = torch.tensor([[1.0, 2.0], h]), torch.tensor([[1.0, 2.5], other])
    result = tap_statistics(*both)
    for value, truth in zip(result, expected, strict=True):
        assert value[1].item() == pytest.approx(truth, rel=1e-6, abs=1e-12, nan_ok=True)
        assert math.isfinite(value[0].item())


@pytest.mark.parametrize("view", VIEWS)
def test_layout_does_not_matter(view: str) -> None:
    """Catches kernels that assume contiguous rows."""
    h, other = (VIEWS[view](x) for x in states(torch.float32, 0.1))
    for a, b in zip(
        tap_statistics(h, other), tap_statistics(h.clone(), other.clone()), strict=True
    ):
        assert_close(a, b, rtol=1e-12)
    assert_close(feature_kl(h, other), feature_kl(h.contiguous(), other.contiguous()), rtol=1e-6)


@pytest.mark.parametrize("drift", [1e-4, 0.1, 2.0])
def test_feature_kl(drift: float) -> None:
    """Catches a KL over the wrong axis."""
    h, other = states(torch.float32, drift)
    a, b = h.double(), other.double()
    expected = (a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1)
    assert_close(feature_kl(h, other), expected, rtol=1e-4, atol=1e-15)
    with prefer("reference"):
        assert_close(feature_kl(h, other), expected, rtol=1e-9, atol=1e-15)


def test_feature_kl_saturates_but_survives() -> None:
    """Catches an overflow on hidden states of 1e30, where only the largest channel counts."""
    h = torch.tensor([[1e30, 0.0, 1.0]])
    assert feature_kl(h, h.clone()).item() == 0
    assert feature_kl(h, torch.tensor([[9e29, 0.0, 1.0]])).item() == 0
    assert feature_kl(h, h.roll(1, -1)).item() == pytest.approx(1e30)


def test_isolated_error() -> None:
    """Catches dividing by the output where the update was meant: here that hides a factor of 100."""
    residual, update = 100 * torch.randn(5, 64), torch.randn(5, 64)
    wrong = update * 1.05
    result = isolated_error(residual + update, residual + wrong, update)
    assert_close(result, torch.full((5,), 0.05, dtype=torch.float64), rtol=1e-4)
    with prefer("reference"):
        assert_close(isolated_error(update, wrong, update), result, rtol=1e-4)
    zero = torch.zeros(1, 3)
    assert isolated_error(zero, zero, zero).item() == 0
    assert isolated_error(zero + 1, zero, zero).item() == math.inf


def test_no_rows() -> None:
    """Catches a crash on an empty batch."""
    empty = torch.zeros(0, 8)
    assert all(column.shape == (0,) for column in tap_statistics(empty, empty))
    assert feature_kl(empty, empty).shape == row_norm(empty).shape == (0,)


def test_bad_input_is_named() -> None:
    """Catches hidden states of two widths, or an update of other rows."""
    h, other = states(torch.float32, 0.1)
    with pytest.raises(ValueError, match="hidden states"):
        tap_statistics(h, other[:, :5])
    with pytest.raises(ValueError, match="outputs and updates"):
        isolated_error(h, other, h[:3])


def test_many_taps_finish_together() -> None:
    """Catches a formula that mixes the rows of taps which are finished in one call."""
    pairs = [states(torch.float32, drift) for drift in (0.0, 1e-3, 1.0)]
    norms = zip(*(tap_norms(h, other) for h, other in pairs), strict=True)
    together = statistics_of(TapNorms(*(torch.stack(column) for column in norms)))
    for n, pair in enumerate(pairs):
        for column, alone in zip(together, tap_statistics(*pair), strict=True):
            assert torch.equal(column[n], alone)


def test_a_silent_row_has_a_positive_zero() -> None:
    """Catches max |h| = −0.0, whose logarithm is NaN: two equal silent models then failed."""
    zeros = torch.zeros(4, 64)
    found = tap_statistics(zeros, -zeros)
    assert not torch.signbit(found.max_abs).any()
