"""The candidate estimator: KL from the logits that a sketch keeps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.lens import Readout, lens_statistics
from quantwatch_kernels.compare.sketch import Sketch, head_rows, sketch_rows
from quantwatch_kernels.compare.sketch_estimate import Estimate, estimated_kl
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.testing import assert_close

HIDDEN, VOCABULARY = 32, 2000


def readout(dtype: torch.dtype = torch.float32, **how: float | int) -> Readout:
    torch.manual_seed(3)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head.weight.data *= 6
    return Readout(nn.RMSNorm(HIDDEN).to(dtype), head.to(dtype), **how)  # type: ignore[arg-type]


READOUTS = {
    "plain": readout(),
    "scaled": readout(scale=0.5),
    "soft-capped": readout(softcap=8.0),
    "cut": readout(width=1900),
    "bfloat16": readout(torch.bfloat16),
}


def states(rows: int, drift: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    h = torch.randn(rows, HIDDEN)
    return h, h + drift * torch.randn(rows, HIDDEN)


def twin(kept: Sketch, z: Tensor) -> tuple[list[float], list[float]]:
    """The docstring's formulas as they stand, row by row, in 80-bit floats."""
    kl, error = [], []
    k, m = kept.num_top, kept.ids.shape[1] - kept.num_top
    for row in range(len(z)):
        old = kept.logits[row].numpy().astype(np.longdouble)
        delta = z[row].numpy().astype(np.longdouble) - old
        p = np.exp(old[:k] - np.longdouble(kept.log_normalizer[row].item()))
        rho = np.longdouble(kept.tail_mass[row].item())
        p, rho = p / (p.sum() + rho), rho / (p.sum() + rho)
        growth = (p * np.exp(delta[:k])).sum() + rho * np.exp(delta[k:]).mean()
        first = (p * delta[:k]).sum() + rho * delta[k:].mean()
        y = np.exp(delta[k:]) / growth
        kl.append(float(np.log(growth) - first + rho**2 * y.var(ddof=1) / (2 * m)))
        error.append(float(rho * (y - delta[k:]).std(ddof=1) / math.sqrt(m)))
    return kl, error


@pytest.mark.parametrize("drift", [1e-3, 0.05, 1.0])
@pytest.mark.parametrize("name", READOUTS)
def test_equals_the_formula(name: str, drift: float) -> None:
    """Catches a scale or cap that the candidate lacks, and terms of the two corrections."""
    r, (h, other) = READOUTS[name], states(60, drift)
    kept = sketch_rows(h, r, 16, 12, torch.arange(60))
    found = estimated_kl(other, kept, r)
    weight = r.head.weight.double()  # type: ignore[attr-defined]
    products = (weight[kept.ids.long()] * r.normed(other).double()[:, None]).sum(-1).detach()
    z = r.finish(products.to(r.head.weight.dtype))  # type: ignore[attr-defined]
    kl, error = twin(kept, z)
    # Two ways to round a product differ by 1e-7 of it, or by a step of bfloat16 now and then.
    exact_products = name != "bfloat16"
    atol = 3e-7 * drift if exact_products else 5e-3
    assert_close(
        found.kl, torch.tensor(kl).double(), rtol=2e-3 if exact_products else 0.2, atol=atol
    )
    assert_close(
        found.standard_error,
        torch.tensor(error).double(),
        rtol=5e-3 if exact_products else 0.3,
        atol=atol,
    )
    assert not found.unanswered.any()
    assert fallbacks() == {}


@pytest.mark.parametrize("drift", [1e-5, 1e-2, 3.0])
def test_of_all_ids_it_is_the_exact_kl(drift: float) -> None:
    """Catches digits lost where terms cancel: the twin sums in float64 from the same logits."""
    r, (h, other) = readout(width=300), states(40, drift)
    kept = sketch_rows(h, r, 300, 4, torch.arange(40))
    found = estimated_kl(other, kept, r)
    every = torch.arange(300).expand(40, 300).int()
    z, y = (torch.empty(40, 300) for _ in range(2))
    z.scatter_(1, kept.ids[:, :300].long(), kept.logits[:, :300])
    y.copy_(head_rows(r.normed(other), every, r))
    assert_close(found.kl, compare_exactly(z, y).kl, rtol=1e-6, atol=1e-18)
    assert found.standard_error.tolist() == [0.0] * 40


@pytest.mark.parametrize("backend", ["native", "aten", "reference"])
def test_equal_hidden_states_are_exactly_zero(backend: str) -> None:
    """Whatever else is in the batch, and however the product is rounded there."""
    r, (h, other) = readout(), states(20, 0.1)
    with prefer(backend):
        kept = sketch_rows(h, r, 16, 8, torch.arange(20))
        other[3:17] = h[3:17]
        found = estimated_kl(other[2:], kept.rows(slice(2, None)), r)
    for column in found[:4]:
        assert column[1:15].tolist() == [0.0] * 14
        assert (column[[0, 15]] > 0).all()
    assert not found.unanswered.any()


@pytest.mark.parametrize("drift", [1e-3, 0.1, 0.3], ids=["tiny", "small", "large"])
def test_unbiased_over_seeds_and_as_sure_as_it_says(drift: float) -> None:
    """Catches a logarithm without its correction (1 % here), and errors that promise too much."""
    r, (h, other) = readout(), states(8, drift)
    exact = lens_statistics(h, other, r).kl
    many = torch.arange(8 * 250)
    repeated = sketch_rows(h.repeat(250, 1), r, 8, 16, many)
    found = estimated_kl(other.repeat(250, 1), repeated, r)
    kl = found.kl.view(250, 8)
    spread = kl.std(0) / 250**0.5
    assert (((kl.mean(0) - exact) / spread).abs() < 4).sum() >= 7
    assert float((kl.mean(0) / exact - 1).abs().median()) < 8e-3
    ratio = kl.std(0) / (found.standard_error.view(250, 8) ** 2).mean(0).sqrt()
    # Stratified draws vary less than independent ones; the next order in 1/16 is in neither.
    assert (ratio < (1.1 if drift < 0.2 else 1.2)).all()
    assert (ratio > 0.3).all()


def one_hot(logits: Tensor) -> tuple[Tensor, Readout]:
    """Hidden states that are the logits: a head of which each id is its own direction."""
    head = nn.Linear(logits.shape[1], logits.shape[1], bias=False)
    head.weight.data = torch.eye(logits.shape[1])
    return logits, Readout(nn.Identity(), head)


def exact_kl(z: Tensor, y: Tensor) -> Tensor:
    return compare_exactly(z, y).kl


def tail_case(case: str) -> tuple[Tensor, Tensor]:
    """Two rows of logits (256 times) that agree on the 64 likeliest ids."""
    torch.manual_seed(4)
    z = torch.linspace(0, -6, 3000)
    z[:64] += 2
    y = z.clone()
    tail = torch.arange(64, 3000)
    if case == "shuffled":
        y[tail] = z[tail[torch.randperm(len(tail))]]
    elif case == "reversed":
        y[tail] = z[tail.flip(0)]
    elif case == "noise":
        y[tail] += 0.01 * torch.randn(len(tail))
    elif case == "gone":
        y[tail] -= 3.0
    return z.expand(256, -1).contiguous(), y.expand(256, -1).contiguous()


TAIL = {
    "noise": (0.02, 0.95),
    "gone": (0.02, 0.95),
    "shuffled": (0.05, 0.85),
    "reversed": (0.05, 0.75),
}
"""Case → how far the mean may be off, and how many rows lie within 3 standard errors at least. The
reversed tail lifts the least likely ids by six nats: few draws see them, which is all that their
spread can say."""


@pytest.mark.parametrize("case", TAIL)
def test_changes_of_the_tail_alone_are_found(case: str) -> None:
    """The trap of truncated top-k estimates: 0 on equal models, right on large changes, and wrong
    where only unlikely ids change."""
    (h, r), other = one_hot(tail_case(case)[0]), tail_case(case)[1]
    found = estimated_kl(other, sketch_rows(h, r, 64, 64, torch.arange(256)), r)
    exact = exact_kl(h[:1], other[:1])
    assert (found.kl > 0.2 * exact).all()
    off, within = TAIL[case]
    assert ((found.kl - exact).abs() < 3 * found.standard_error).double().mean() > within
    assert float(found.kl.mean() / exact) == pytest.approx(1, abs=off)


def test_what_no_draw_saw_is_unanswered_not_zero() -> None:
    """One id of probability 1e-6 is lifted above all others: the truth is 5 nats."""
    z = torch.zeros(4, 500)
    z[:, :100] += 12
    y = z.clone()
    y[:, 450] += 24
    y[3] = z[3] + 1  # every logit by as much: nothing changed, which few of them can't know
    h, r = one_hot(z)
    found = estimated_kl(y, sketch_rows(h, r, 64, 8, torch.arange(4)), r)
    assert (exact_kl(z, y)[:3] > 5).all()
    assert found.unanswered.tolist() == [True] * 4
    assert found.kl.isnan().all()
    assert found.standard_error.isnan().all()


NONFINITE = {
    "NaN in the candidate": (0.0, math.nan, False),
    "NaN in the reference": (math.nan, 0.0, False),
    "NaN in both": (math.nan, math.nan, False),
    "infinity in the reference": (math.inf, 0.0, False),
    "infinity in the candidate": (0.0, math.inf, True),
    "minus infinity in the candidate": (0.0, -math.inf, True),
    "near overflow": (0.0, 3e38, True),
}


@pytest.mark.parametrize(("theirs", "ours", "unanswered"), NONFINITE.values(), ids=NONFINITE)
def test_rows_that_are_not_finite(theirs: float, ours: float, unanswered: bool) -> None:
    """NaN as the exact lens says, or no answer; and the next row has one."""
    head = nn.Linear(4, 300, bias=False)
    head.weight.data = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    r = Readout(nn.Identity(), head)
    h, other = torch.ones(2, 4), torch.full((2, 4), 1.01)
    other[:, 0] = 1.0
    h[0, 1], other[0, 1] = theirs, ours
    found = estimated_kl(other, sketch_rows(h, r, 8, 4, torch.arange(2)), r)
    assert found.kl[0].isnan()
    assert found.unanswered.tolist() == [unanswered, False]
    exact = lens_statistics(h, other, r).kl
    assert unanswered or exact[0].isnan()
    assert 0 <= found.kl[1] < 10 * exact[1] + 1e-12


def test_minus_infinity_in_the_reference_is_unanswered() -> None:
    """Its own weight is 0: what the candidate puts there can't be in any mean over p."""
    z = torch.zeros(1, 300)
    z[0, 200] = -torch.inf
    head = nn.Linear(2, 300, bias=False)
    head.weight.data = torch.zeros(300, 2)
    head.weight.data[:, 0], head.weight.data[200, 1] = 1.0, 1e38
    h, other = torch.tensor([[1.0, -1e38]]), torch.tensor([[1.0, 1.0]])
    r = Readout(nn.Identity(), head)
    found = estimated_kl(other, sketch_rows(h, r, 8, 4, torch.arange(1)), r)
    assert found.unanswered.tolist() == [True]


def test_differences_beyond_what_an_exponential_holds() -> None:
    """e^1000 has no double: catches ∞ − ∞."""
    z = torch.zeros(2, 40)
    y = z.clone()
    y[0, 3], y[1, 3] = 1000.0, -1000.0
    h, r = one_hot(z)
    found = estimated_kl(y, sketch_rows(h, r, 40, 4, torch.arange(2)), r)
    assert_close(found.kl, exact_kl(z, y), rtol=1e-12)


@given(
    st.integers(0, 2**31), st.floats(1e-6, 30), st.integers(5, 60), st.integers(2, 30),
    st.integers(6, 200),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_never_negative_and_symmetric_in_shifts(
    seed: int, size: float, k: int, m: int, width: int
) -> None:
    """No term is negative; a shift of all logits changes nothing."""
    torch.manual_seed(seed)
    z = 4 * torch.randn(3, width)
    y = z + size * torch.randn(3, width)
    h, r = one_hot(z)
    kept = sketch_rows(h, r, k, m, torch.arange(3))
    found, moved = estimated_kl(y, kept, r), estimated_kl(y + 8, kept, r)
    assert (found.kl >= 0).all()
    assert (found.standard_error >= 0).all()
    assert_close(moved.kl, found.kl, rtol=1e-3, atol=1e-5 * size)
    if k >= width:
        assert_close(found.kl, exact_kl(z, y), rtol=1e-4, atol=1e-9)


def test_deviations_are_those_of_the_exact_lens() -> None:
    r, (h, other) = readout(), states(30, 0.2)
    kept = sketch_rows(h, r, 8, 4, torch.arange(30))
    found, exact = estimated_kl(other, kept, r), lens_statistics(h, other, r)
    for name in ("topk_logit_deviation_k5", "topk_logit_deviation_k3"):
        assert_close(getattr(found, name), getattr(exact, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, HIDDEN), (5, HIDDEN, 1), (5,)], ids=str)
def test_bad_input(shape: tuple[int, ...]) -> None:
    r = readout()
    kept = sketch_rows(torch.zeros(5, HIDDEN), r, 8, 4, torch.arange(5))
    with pytest.raises(ValueError, match=r"hidden states must be \[5, width\]"):
        estimated_kl(torch.zeros(shape), kept, r)


def test_no_rows() -> None:
    r = readout()
    kept = sketch_rows(torch.zeros(0, HIDDEN), r, 8, 4, torch.arange(0))
    found: Estimate = estimated_kl(torch.zeros(0, HIDDEN), kept, r)
    assert [len(column) for column in found] == [0] * 5
