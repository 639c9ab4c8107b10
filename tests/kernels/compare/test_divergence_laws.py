"""Laws that every pair of distributions obeys."""

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.compare.output import output_statistics
from quantwatch_kernels.testing import assert_close

F32 = torch.float32
compare = partial(output_statistics, reference_dtype=F32, candidate_dtype=F32)
logit = st.floats(-60, 60, width=32)
row = st.integers(2, 200).flatmap(
    lambda n: st.tuples(*(st.lists(logit, min_size=n, max_size=n) for _ in "pq"))
)
scale = st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 1.0])
quick = settings(max_examples=60)


def pair(rows: tuple[list[float], list[float]], shrink: float) -> tuple[Tensor, Tensor]:
    """Return logits and the same plus `shrink` times other logits."""
    z = torch.tensor([rows[0]])
    return z, z + shrink * torch.tensor([rows[1]])


@pytest.mark.slow
@quick
@given(row, scale)
@example(([0.0, 17.0, 0.0], [0.0, 0.0, 35.5]), 1.0)  # a sum that rounding took above ln 2
def test_bounds(rows: tuple[list[float], list[float]], shrink: float) -> None:
    """Catches a negative divergence, a JS above ln 2, a TV above 1, Pinsker's inequality broken."""
    z, candidate = pair(rows, shrink)
    s = compare(z, candidate, torch.tensor([0]))
    kl, reverse, js, tv = (x.item() for x in (s.logit_kl, s.reverse_kl, s.js, s.tv))
    assert kl >= 0
    assert reverse >= 0
    assert 0 <= js <= math.log(2)
    assert 0 <= tv <= 1
    assert min(kl, reverse) >= 2 * tv**2 * (1 - 1e-5)


@pytest.mark.slow
@quick
@given(row, scale)
def test_exchanging_the_models(rows: tuple[list[float], list[float]], shrink: float) -> None:
    """Catches a JS or TV that depends on who is the reference, a reverse KL that isn't KL reversed."""
    z, candidate = pair(rows, shrink)
    s, t = compare(z, candidate, torch.tensor([0])), compare(candidate, z, torch.tensor([0]))
    assert_close(s.js, t.js, rtol=2e-4, atol=1e-15, what="js")
    assert_close(s.tv, t.tv, rtol=2e-4, atol=1e-15, what="tv")
    assert_close(s.reverse_kl, t.logit_kl, rtol=2e-4, atol=1e-15, what="reverse")


@pytest.mark.slow
@quick
@given(row, st.sampled_from([0.0, 0.1, 1.0]), st.floats(-100, 100, width=16))
@example(([0.0, 1.6237837076187134], [0.0, 0.0]), 0.1, 3.0)  # δz rounds away what differs
@example(([0.0, -20.0, 1.6237837], [0.0, 60.0, 0.0]), 0.1, 100.0)  # beside an unlikely outlier
def test_a_constant_shift_changes_nothing(
    rows: tuple[list[float], list[float]], shrink: float, shift: float
) -> None:
    """Catches a statistic of logits where one of distributions was meant."""
    z, candidate = pair(rows, shrink)
    moved = candidate + shift
    candidate = moved - shift  # what float32 keeps of it
    s, t = compare(z, candidate, torch.tensor([0])), compare(z, moved, torch.tensor([0]))
    for name in ("logit_kl", "reverse_kl", "js", "tv"):
        assert_close(getattr(s, name), getattr(t, name), rtol=1e-3, atol=1e-8, what=name)


@pytest.mark.parametrize("drift", [1e-6, 0.05, 2.0])
def test_renaming_the_ids_changes_nothing(drift: float) -> None:
    """Catches a block or tail that is counted twice or not at all."""
    z = 3 * torch.randn(4, 5000)
    candidate = z + drift * torch.randn(4, 5000)
    order = torch.randperm(5000)
    ids = torch.arange(4)
    where = torch.argsort(order)[ids]
    s, t = compare(z, candidate, ids), compare(z[:, order], candidate[:, order], where)
    for name in s._fields[:12]:
        assert_close(getattr(s, name), getattr(t, name), rtol=2e-5, atol=1e-7 * drift, what=name)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Catches a chunk whose form is chosen by another row: equal only to rounding, never by more."""
    z = 3 * torch.randn(64, 4000)
    candidate = z + torch.logspace(-6, 0, 64).unsqueeze(-1) * torch.randn(64, 4000)
    together = compare(z, candidate, torch.zeros(64).long()).logit_kl
    alone = torch.cat(
        [compare(z[i : i + 1], candidate[i : i + 1], torch.tensor([0])).logit_kl for i in range(64)]
    )
    assert_close(together, alone, rtol=2e-5)
