"""Output statistics against an independent computation in 80-bit floats, and against the twin."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantwatch_kernels.compare.output import OutputStatistics, leaked_mass, output_statistics
from quantwatch_kernels.registry import Fallback, fallbacks, prefer
from quantwatch_kernels.testing import assert_close, drifted_logits

ROWS, WIDTH = 24, 3001  # 3001 is no multiple of any block
Pair = tuple[Tensor, Tensor]
F32 = torch.float32
Wide = NDArray[np.longdouble]

compare = partial(output_statistics, reference_dtype=F32, candidate_dtype=F32)


def targets(rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(7))


def bfloat16_logits() -> Pair:
    z, _ = drifted_logits(ROWS, WIDTH, 0)
    return z, z.bfloat16().float()


def constant_shift() -> Pair:
    z, candidate = drifted_logits(ROWS, WIDTH, 0.02)
    return z, candidate + 5


def rotated_rows() -> Pair:
    """Three rows of the head rotated: everything else is exact, as in a head-only fault."""
    z, _ = drifted_logits(ROWS, WIDTH, 0)
    candidate = z.clone()
    candidate[:, [260, 281, 284]] = z[:, [281, 284, 260]]
    return z, candidate


def one_outlier() -> Pair:
    """A tiny drift with one large difference: neither form of float32 alone is right."""
    z, candidate = drifted_logits(ROWS, WIDTH, 1e-4)
    candidate[:, 77] = z[:, 77] + 4
    return z, candidate


def peaked() -> Pair:
    """One id owns nearly everything, as inside a repeated word."""
    z, candidate = drifted_logits(ROWS, WIDTH, 0.3)
    return z.index_add(1, torch.tensor([1]), torch.full((ROWS, 1), 12.0)), candidate.index_add(
        1, torch.tensor([1]), torch.full((ROWS, 1), 12.3)
    )


def forgotten_id() -> Pair:
    """The candidate gives up one id of 1e-4: reverse KL is 40 times smaller than KL."""
    z, candidate = drifted_logits(ROWS, WIDTH, 0.05)
    z[:, 5] = candidate[:, 5] = z.logsumexp(-1) - 9
    candidate[:, 5] -= 50
    return z, candidate


def unrelated() -> Pair:
    return drifted_logits(ROWS, WIDTH, 0)[0], 20 * drifted_logits(ROWS, WIDTH, 0, seed=1)[0]


CASES: dict[str, Callable[[], Pair]] = {
    "bf16-logits": bfloat16_logits,
    "int8-like": partial(drifted_logits, ROWS, WIDTH, 0.06),
    "int8-like-wider": partial(drifted_logits, ROWS, WIDTH, 0.2),
    "int4-like": partial(drifted_logits, ROWS, WIDTH, 1.0),
    "broken": partial(drifted_logits, ROWS, WIDTH, 5.0),
    "drift-1e-6": partial(drifted_logits, ROWS, WIDTH, 1e-6),
    "constant-shift": constant_shift,
    "rotated-rows": rotated_rows,
    "one-outlier": one_outlier,
    "peaked": peaked,
    "forgotten-id": forgotten_id,
    "unrelated": unrelated,
    "V-smaller-than-K": partial(drifted_logits, ROWS, 3, 0.3),
    "V-1": partial(drifted_logits, ROWS, 1, 0.3),
    "one-row": partial(drifted_logits, 1, WIDTH, 0.3),
}


def independent(z_ref: Tensor, z_cand: Tensor, ids: NDArray[np.int64]) -> dict[str, Wide]:
    """The definitions in 80-bit floats, in the forms Σ(q − p + p·ln(p/q)) that forgive a rounded lse."""
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("this machine has no 80-bit floats to be the judge")
    z, y = (x.numpy().astype(np.longdouble) for x in (z_ref, z_cand))
    lp, lq = (x - _lse(x) for x in (z, y))
    p, q = np.exp(lp), np.exp(lq)
    rows = np.arange(len(z))
    return {
        "logit_kl": (q - p + p * (lp - lq)).sum(-1),
        "reverse_kl": (p - q + q * (lq - lp)).sum(-1),
        "js": -(p * np.log1p((q - p) / p / 2) + q * np.log1p((p - q) / q / 2)).sum(-1) / 2,
        "tv": np.abs(p - q).sum(-1) / 2,
        "delta_p": (q - p)[rows, ids],
        "nll_reference": -lp[rows, ids],
        "nll_candidate": -lq[rows, ids],
        "nll_difference": (lp - lq)[rows, ids],
    }


def _scale(name: str, truth: Tensor, tv: Tensor) -> float:
    """Signed statistics cancel in their mean: float32's p limits them to 1e-6 of Σ p·|δ| ≥ 2·TV."""
    floor = 4 * tv.mean().item() if name in ("delta_p", "nll_difference") else 0.0
    return max(truth.abs().mean().item(), floor)


def _lse(x: Wide) -> Wide:
    top = x.max(-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(x - top).sum(-1, keepdims=True)))


@pytest.mark.parametrize("case", CASES)
def test_equals_the_definitions(case: str) -> None:
    """Catches float32 noise: tokens must be right to 1e-4, means to 1e-6, even at a KL of 5e-13."""
    z, candidate = CASES[case]()
    ids = targets(len(z), z.shape[1])
    actual = compare(z, candidate, ids)._asdict()
    for name, wide in independent(z, candidate, ids.numpy()).items():
        truth = torch.from_numpy(wide.astype(np.float64))
        scale = _scale(name, truth, actual["tv"])
        assert_close(actual[name], truth, rtol=1e-4, atol=1e-6 * scale + 1e-300, what=name)
        error = abs(actual[name].mean().item() - truth.mean().item())
        assert error <= 1e-6 * scale, f"{name}: mean is off by {error / scale:.1e} relative"


@pytest.mark.parametrize("case", CASES)
def test_equals_the_twin(case: str) -> None:
    """Catches a fast path that drifts from its twin, ids and top-k logits included."""
    z, candidate = CASES[case]()
    ids = targets(len(z), z.shape[1])
    actual = compare(z, candidate, ids)
    with prefer("reference"):
        expected = compare(z, candidate, ids)
    for name in OutputStatistics._fields:
        a, b = getattr(actual, name), getattr(expected, name)
        exact = name != "logit_kl" and ("ids" in name or "logit" in name or "top" in name)
        assert a.dtype == b.dtype
        atol = 0 if exact else 1e-6 * _scale(name, b, expected.tv) + 1e-300
        assert_close(a, b, rtol=0 if exact else 1e-4, atol=atol, what=name)


@pytest.mark.parametrize("rows", [1, 7, ROWS])
def test_equal_models_are_exactly_zero(rows: int) -> None:
    """Catches a KL of ±6e-7 between identical models (numeric_anchors §7, row 2)."""
    z, _ = drifted_logits(rows, WIDTH, 0)
    result = compare(z, z.clone(), targets(rows))
    for name in ("logit_kl", "reverse_kl", "js", "tv", "delta_p", "nll_difference"):
        assert torch.equal(getattr(result, name), torch.zeros(rows, dtype=torch.float64)), name
    assert torch.equal(result.topk_logit_deviation_k5, torch.zeros(rows, dtype=torch.float64))
    for name in ("top1_agreement", "topk_overlap_k5"):
        assert torch.equal(getattr(result, name), torch.ones(rows, dtype=torch.float64)), name
    assert torch.equal(result.nll_reference, result.nll_candidate)


def test_columns_by_hand() -> None:
    """Catches a swapped sign or direction: two ids, worked out on paper."""
    z, candidate = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[0.0, 0.0]])
    result = compare(z, candidate, torch.tensor([1]))
    assert result.logit_kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert result.reverse_kl.item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert result.tv.item() == pytest.approx(0.25)
    assert result.delta_p.item() == pytest.approx(-0.25)
    assert result.nll_reference.item() == pytest.approx(-math.log(0.75))
    assert result.nll_difference.item() == pytest.approx(math.log(1.5))
    assert result.topk_logit_deviation_k5.item() == pytest.approx(math.log(3) / 2)


NAN, INF = math.nan, math.inf
STRANGE = {
    "minus-inf-in-both": ([0.0, 1.0, -INF], [0.5, 1.0, -INF], "finite"),
    "q-0-where-p-is-not": ([0.0, 1.0, 2.0], [0.0, 1.0, -INF], INF),
    "p-0-where-q-is-not": ([0.0, 1.0, -INF], [0.0, 1.0, 2.0], "finite"),
    "nan-in-reference": ([0.0, NAN, 2.0], [0.0, 1.0, 2.0], NAN),
    "nan-in-candidate": ([0.0, 1.0, 2.0], [0.0, 1.0, NAN], NAN),
    "plus-inf": ([0.0, 1.0, 2.0], [0.0, INF, 2.0], NAN),
    "nothing-but-minus-inf": ([0.0, 1.0, 2.0], [-INF, -INF, -INF], NAN),
    "far-apart": ([0.0, 400.0, 0.0], [400.0, 0.0, 0.0], 400.0),
}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_rows_stay_alone(case: str) -> None:
    """Catches 0·∞ = NaN, and one bad token that poisons the others of its chunk."""
    reference, candidate, expected = STRANGE[case]
    z, y = torch.tensor([[1.0, 2.0, 3.0], reference]), torch.tensor([[1.0, 2.1, 3.0], candidate])
    result = compare(z, y, torch.tensor([0, 0]))
    assert torch.isfinite(result.logit_kl[0])
    assert result.logit_kl[0].item() == pytest.approx(
        compare(z[:1], y[:1], torch.tensor([0])).logit_kl.item()
    )
    kl = result.logit_kl[1].item()
    if expected == "finite":
        assert math.isfinite(kl)
        assert math.isfinite(result.js[1].item())
    else:
        assert kl == pytest.approx(expected, nan_ok=True)
    if math.isnan(kl):
        assert all(math.isnan(column[1].item()) for column in result[:9])
        healthy = bool(torch.isfinite(z[1]).all())
        assert math.isfinite(result.nll_reference[1].item()) == healthy
    assert sum(fallbacks().values()) == (0 if math.isnan(kl) else 1)


def test_infinities_by_hand() -> None:
    """Catches an infinite KL reported as large, and a finite statistic lost beside it."""
    z, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -INF]])
    result = compare(z, y, torch.tensor([1]))
    assert result.logit_kl.item() == INF
    assert result.reverse_kl.item() == pytest.approx(math.log(2))
    assert result.tv.item() == pytest.approx(0.5)
    assert result.js.item() == pytest.approx(0.75 * math.log(4 / 3))
    assert result.delta_p.item() == pytest.approx(-0.5)
    assert result.nll_candidate.item() == INF
    reason = "rows with infinite logits"
    assert fallbacks() == {Fallback("output_statistics", "aten", "reference", reason): 1}


TIES = {
    "argmax-differs-clearly": ([2.0, 1.0], [1.0, 2.0], F32, 0.0),
    "one-bf16-step-in-reference": ([2.0, 2.015625], [3.0, 1.0], torch.bfloat16, 1.0),
    "two-bf16-steps": ([2.0, 2.03125], [3.0, 1.0], torch.bfloat16, 0.0),
    "bf16-step-is-no-tie-in-float32": ([2.0, 2.015625], [3.0, 1.0], F32, 0.0),
    "exact-tie-in-candidate": ([2.0, 5.0], [3.0, 3.0], F32, 1.0),
}


@pytest.mark.parametrize("case", TIES)
def test_top1_knows_ties(case: str) -> None:
    """Catches a "changed" top-1 that is one rounding step of the head's dtype."""
    reference, candidate, dtype, expected = TIES[case]
    result = output_statistics(
        torch.tensor([reference]),
        torch.tensor([candidate]),
        torch.tensor([0]),
        reference_dtype=dtype,
        candidate_dtype=dtype,
    )
    assert result.top1_agreement.item() == expected


def test_overlap_divides_by_what_there_is() -> None:
    """Catches an overlap of 0.6 between identical sets when only three ids exist."""
    z, candidate = drifted_logits(4, 3, 0.1)
    result = compare(z, candidate, targets(4, 3))
    assert torch.equal(result.topk_overlap_k5, torch.ones(4, dtype=torch.float64))
    assert result.reference_ids.shape == (4, 3)


def test_no_rows_and_no_targets() -> None:
    """Catches a crash on an empty batch, and a target that is invented where there is none."""
    z, candidate = drifted_logits(3, 40, 0.1)
    empty = compare(z[:0], candidate[:0], targets(0, 40))
    assert empty.logit_kl.shape == (0,)
    assert empty.reference_ids.shape == (0, 10)
    result = compare(z, candidate, torch.tensor([2, -1, 5]))
    for name in ("delta_p", "nll_reference", "nll_candidate", "nll_difference"):
        assert getattr(result, name).isnan().tolist() == [False, True, False]
    assert torch.isfinite(result.logit_kl).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_logits(dtype: torch.dtype) -> None:
    """Catches statistics computed in the head's dtype instead of float32."""
    z, candidate = (x.to(dtype) for x in drifted_logits(8, 300, 0.1))
    a = compare(z, candidate, targets(8, 300))
    b = compare(z.float(), candidate.float(), targets(8, 300))
    assert torch.equal(a.logit_kl, b.logit_kl)


BAD: dict[str, tuple[Callable[[], tuple[Tensor, Tensor, Tensor]], str]] = {
    "other-width": (lambda: (torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2).long()), "width"),
    "target-outside": (lambda: (torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([3])), "-1 … 2"),
    "int-logits": (
        lambda: (torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), torch.tensor([0])),
        "floats",
    ),
    "float-targets": (lambda: (torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1)), "int64"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    """Catches shapes that broadcast silently."""
    build, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        compare(*build())


def test_leaked_mass() -> None:
    """Catches a wider vocabulary whose padding ids take probability unseen."""
    z, _ = drifted_logits(6, 300, 0)
    wide = torch.cat([z, torch.zeros(6, 64)], -1)
    expected = torch.softmax(wide.double(), -1)[:, 300:].sum(-1)
    assert_close(leaked_mass(wide, 300), expected, rtol=1e-6)
    assert torch.equal(leaked_mass(z, 300), torch.zeros(6, dtype=torch.float64))
    with prefer("reference"):
        assert_close(leaked_mass(wide, 300), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="shared"):
        leaked_mass(z, 301)
