"""INT8 attention: its scores against float64, what each repair leaves, parts put together."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.serve.attention_int8 import Int8Scores, int8_attention, int8_scores
from quantwatch_kernels.serve.merge import merge_states

PLAIN = Int8Scores()
REPAIRS = {
    "plain": PLAIN,
    "per token": Int8Scores(scale="token"),
    "smoothed": Int8Scores(smooth=True),
    "query's residual": Int8Scores(residual="query"),
    "both residuals": Int8Scores(residual="both"),
    "smoothed, both": Int8Scores(smooth=True, residual="both"),
}


def data(queries: int = 24, keys: int = 24, features: int = 16, seed: int = 0) -> list[Tensor]:
    """Queries, keys with a feature that is large everywhere, values; 4 heads on 2."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, queries, features), (2, 2, keys, features), (2, 2, keys, features)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    k[..., 3] += 6
    return [q, k, v]


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp in float64."""
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:]).triu(1 + k.shape[2] - q.shape[2]).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def by_hand(q: Tensor, k: Tensor, how: Int8Scores) -> Tensor:
    """True scores as the codes give them, in float64, with q·k̄ added back."""
    q, k = q.double(), k.double()
    mean = k.mean(2, keepdim=True) if how.smooth else torch.zeros_like(k[:, :, :1])
    k = k - mean
    parts = []
    for x in (q, k):
        top = x.abs().amax(-1, keepdim=True) if how.scale == "token" else x.abs().max()
        scale = (top.float() / 127).double()
        parts.append(((x / scale).float().round().double() * scale, x))
    (qc, q), (kc, k) = parts
    scores = qc @ kc.mT
    if how.residual != "none":
        scores = scores + (q - qc).half().double() @ kc.mT
    if how.residual == "both":
        scores = scores + q @ (k - kc).half().double().mT
    return scores + q @ mean.mT


@pytest.mark.parametrize("features", [16, 1100], ids=["16", "beyond 2^24"])
@pytest.mark.parametrize("how", REPAIRS.values(), ids=REPAIRS.keys())
def test_scores_are_the_definition(how: Int8Scores, features: int) -> None:
    """Catches inexact sums of codes, a scale used twice, a residual of the wrong side."""
    q, k, _ = data(features=features)
    k = k.repeat_interleave(2, 1)
    scores, shift = int8_scores(q, k, how)
    expected = by_hand(q, k, how)
    assert torch.allclose(
        (scores + shift).double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max())
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (5, 24), (1, 24), (1, 1)])
@pytest.mark.parametrize("how", REPAIRS.values(), ids=REPAIRS.keys())
def test_attention_and_its_lse(how: Int8Scores, queries: int, keys: int, causal: bool) -> None:
    """Catches causality from the wrong end, and a log-sum-exp without the keys' mean."""
    q, k, v = data(queries, keys)
    out, lse = int8_attention(q, k, v, how, causal=causal)
    wanted, wanted_lse = exact(q, k, v, causal)
    close = 1e-4 if how.residual == "both" else 0.2
    assert torch.allclose(out.double(), wanted, atol=close)
    assert torch.allclose(lse.double(), wanted_lse, atol=close)


def test_what_each_repair_is_worth() -> None:
    """Catches a repair that repairs nothing: relative L2 error, plain per-tensor codes = 1."""
    q, k, v = data(96, 96, 64)
    k[..., 3] += 14  # as the keys of trained models have it: 20 times the spread of the others
    wanted, _ = exact(q, k, v)
    error = {
        name: float((int8_attention(q, k, v, how).out.double() - wanted).norm())
        for name, how in REPAIRS.items()
    }
    assert error["plain"] > 1.8 * error["smoothed"]
    assert error["plain"] > error["query's residual"]  # little: the keys' rounding is left
    assert error["plain"] > 1000 * error["both residuals"]


def test_keys_that_nobody_sees() -> None:
    """Catches masked lanes that enter the scale and the mean."""
    q, k, _ = data()
    k = k.repeat_interleave(2, 1)
    seen = torch.arange(24) < 17
    for how in REPAIRS.values():
        expected = int8_scores(q, k[:, :, :17], how)
        k[:, :, 17:] = torch.nan
        found = int8_scores(q, k, how, seen)
        assert torch.allclose(found[0][..., :17], expected[0], atol=1e-5)
        assert torch.allclose(found[1], expected[1], atol=1e-5)


def test_smoothing_moves_no_output() -> None:
    """Catches a mean over other than the keys: with both residuals nothing may change."""
    q, k, v = data(64, 64)
    one, other = (int8_attention(q, k, v, Int8Scores(smooth, "both")) for smooth in (False, True))
    assert torch.allclose(one.out, other.out, atol=1e-4)
    assert torch.allclose(one.lse, other.lse, atol=1e-4)


def test_zeros_and_nan() -> None:
    """Catches 0/0, and a NaN that disappears into a code."""
    q, k, v = data()
    zero = int8_attention(q, torch.zeros_like(k), v, PLAIN, causal=False)
    assert torch.allclose(
        zero.out, v.mean(2, keepdim=True).repeat_interleave(2, 1).expand(-1, -1, 24, -1), atol=1e-6
    )
    k[0, 0, 3, 5] = torch.nan
    assert int8_attention(q, k, v, Int8Scores(scale="token")).out[0, :2, 3:].isnan().all()


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        pytest.param((2, 3, 24, 16), "4 query heads", id="heads"),
        pytest.param((2, 2, 23, 16), "24 queries don't fit 2 heads and 23 keys", id="queries"),
        pytest.param((2, 2, 24, 8), "the same B, H and D", id="width"),
    ],
)
def test_refused(shape: tuple[int, ...], said: str) -> None:
    """Catches shapes that broadcast."""
    q, _, _ = data()
    with pytest.raises(ValueError, match=said):
        int8_attention(q, torch.zeros(shape), torch.zeros(shape), PLAIN)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 99))
def test_parts_are_the_whole(sizes: list[int], seed: int) -> None:
    """Catches an empty part that gives NaN, and weights without the maximum."""
    generator = torch.Generator().manual_seed(seed)
    scores = 60 * torch.randn(3, sum(sizes), generator=generator, dtype=torch.float64)
    values = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    parts = []
    for s, v in zip(torch.split(scores, sizes, 1), torch.split(values, sizes), strict=True):
        lse = s.logsumexp(-1)
        out = s.softmax(-1) @ v if v.numel() else torch.full((3, 4), torch.nan).double()
        parts.append((out, lse))
    out, lse = merge_states(parts)
    if not sum(sizes):
        assert torch.equal(out, torch.zeros(3, 4).double())
        assert torch.equal(lse, torch.full((3,), -torch.inf).double())
        return
    assert torch.allclose(out, scores.softmax(-1) @ values, rtol=0, atol=1e-12)
    assert torch.allclose(lse, scores.logsumexp(-1), rtol=1e-14, atol=1e-12)


def test_nothing_to_merge() -> None:
    """Catches a maximum of nothing."""
    with pytest.raises(ValueError, match="at least one part"):
        merge_states([])
