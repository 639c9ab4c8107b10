"""What is kept of a reference, what is drawn from its tail, and rows of a head."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantwatch_kernels.compare.lens import Readout
from quantwatch_kernels.compare.sketch import digests, sketch_rows
from quantwatch_kernels.compare.sketch_draws import draw_tail, uniforms
from quantwatch_kernels.compare.sketch_native import native_head_rows
from quantwatch_kernels.registry import fallbacks
from quantwatch_kernels.testing import assert_close

HIDDEN, VOCABULARY = 40, 700


def readout(dtype: torch.dtype = torch.float32, **how: float | int) -> Readout:
    torch.manual_seed(3)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head.weight.data *= 8
    return Readout(nn.RMSNorm(HIDDEN).to(dtype), head.to(dtype), **how)  # type: ignore[arg-type]


def seeds(rows: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + rows)


@pytest.mark.parametrize(
    "how",
    [{}, {"scale": 0.5}, {"softcap": 5.0}, {"width": 650}],
    ids=["plain", "scale", "cap", "cut"],
)
def test_keeps_what_the_distribution_is_made_of(how: dict[str, Any]) -> None:
    """Catches a scale, cap or cut that is left out, and draws from the top or from nowhere."""
    r, h = readout(**how), torch.randn(70, HIDDEN)
    kept = sketch_rows(h, r, 16, 8, seeds(70))
    z = r.logits(h).double()
    _, ids = z.sort(dim=-1, descending=True, stable=True)
    assert kept.ids[:, :16].tolist() == ids[:, :16].tolist()
    assert kept.width == z.shape[1]
    assert_close(kept.logits, z.gather(1, kept.ids.long()), rtol=2e-6, atol=2e-6)
    assert_close(kept.log_normalizer, z.logsumexp(-1), rtol=1e-7)
    assert_close(kept.tail_mass, z.softmax(-1).gather(1, ids[:, 16:]).sum(-1), rtol=2e-6)
    for row in range(70):
        assert not set(kept.ids[row, 16:].tolist()) & set(kept.ids[row, :16].tolist())
    assert fallbacks() == {}


def test_of_few_ids_all_are_kept() -> None:
    kept = sketch_rows(torch.randn(3, HIDDEN), readout(width=9), 16, 4, seeds(3))
    assert (kept.num_top, kept.width) == (9, 9)
    assert kept.tail_mass.tolist() == [0.0] * 3
    assert kept.ids[:, 9:].tolist() == kept.ids[:, :1].expand(3, 4).tolist()


def test_a_tail_without_mass_has_no_draws() -> None:
    """Catches 0/0 where float32 has no number for what is left."""
    head = nn.Linear(2, 300, bias=False)
    head.weight.data = torch.zeros(300, 2)
    head.weight.data[:8, 0] = 400.0
    kept = sketch_rows(torch.ones(1, 2), Readout(nn.Identity(), head), 8, 4, seeds(1))
    assert kept.tail_mass.tolist() == [0.0]
    assert kept.ids[0, 8:].tolist() == [0] * 4


def test_the_same_rows_in_other_company_give_the_same_sketch() -> None:
    """Catches a generator's state that goes from one row to the next."""
    r, h = readout(), torch.randn(130, HIDDEN)
    whole, part = sketch_rows(h, r, 8, 8, seeds(130)), sketch_rows(h[100:], r, 8, 8, seeds(30, 100))
    assert whole.rows(slice(100, None)).ids.tolist() == part.ids.tolist()
    other = sketch_rows(h[100:], r, 8, 8, seeds(30))
    assert other.ids.tolist() != part.ids.tolist()


@pytest.mark.parametrize(
    ("bad", "reference", "log_normalizer"),
    [("nan", torch.nan, "nan"), ("+inf", torch.inf, "nan"), ("-inf", -torch.inf, "inf")],
)
def test_rows_without_a_number(bad: str, reference: float, log_normalizer: str) -> None:
    """−∞ in some logits leaves a distribution, but one that few ids can't stand for."""
    head = nn.Linear(2, 50, bias=False)
    head.weight.data = torch.zeros(50, 2)
    head.weight.data[:, 0], head.weight.data[7, 1] = torch.arange(50.0), 1.0
    h = torch.tensor([[0.1, 0.0], [0.1, reference]])
    if bad != "nan":  # 0 · ∞ would be NaN in all other logits
        head.weight.data[:, 1] = 1e-30
        head.weight.data[7, 1], h[1, 1] = 1e38, float(np.sign(reference)) * 1e38
    kept = sketch_rows(h, Readout(nn.Identity(), head), 5, 2, seeds(2))
    assert torch.isfinite(kept.log_normalizer[0])
    assert str(kept.log_normalizer[1].item()) == log_normalizer


BAD_INPUT = {
    "k below 5": ((3, HIDDEN), 4, 8, (3,), torch.int64, "k must be at least 5"),
    "one draw": ((3, HIDDEN), 8, 1, (3,), torch.int64, "m at least 2"),
    "seeds missing": ((3, HIDDEN), 8, 8, (2,), torch.int64, "seeds int64"),
    "seeds of floats": ((3, HIDDEN), 8, 8, (3,), torch.float32, "seeds int64"),
    "not a matrix": ((HIDDEN,), 8, 8, (HIDDEN,), torch.int64, "must be \\[n, width\\]"),
}


@pytest.mark.parametrize(
    ("shape", "k", "m", "seeds_shape", "dtype", "message"), BAD_INPUT.values(), ids=BAD_INPUT
)
def test_bad_input(
    shape: tuple[int, ...],
    k: int,
    m: int,
    seeds_shape: tuple[int, ...],
    dtype: torch.dtype,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        sketch_rows(torch.zeros(shape), readout(), k, m, torch.zeros(seeds_shape, dtype=dtype))


@pytest.mark.parametrize(
    ("width", "ids", "error"),
    [(HIDDEN + 4, [0], "44 wide"), (HIDDEN, [700], "to 700"), (HIDDEN, [3, -1], "from -1")],
    ids=["width", "id beyond", "id below"],
)
def test_what_the_head_has_not_is_not_read(width: int, ids: list[int], error: str) -> None:
    """Catches compiled code that reads on beside the head's weights."""
    wanted = torch.tensor([ids], dtype=torch.int32)
    with pytest.raises((ValueError, IndexError), match=error):
        native_head_rows(torch.zeros(1, width), wanted, torch.zeros(700, HIDDEN))


def test_no_rows() -> None:
    kept = sketch_rows(torch.zeros(0, HIDDEN), readout(), 8, 4, seeds(0))
    assert kept.ids.shape == (0, 12)


def test_uniform_numbers_are_those_of_splitmix64() -> None:
    """Published outputs for the seed 1234567 (Vigna's splitmix64.c)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = uniforms(torch.tensor([1234567]), 3)[0].tolist()
    assert found == [((x >> 11) + 0.5) * 2.0**-53 for x in published]


@given(st.integers(0, 2**32), st.integers(6, 400), st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_every_id_comes_up_as_often_as_its_mass_says(seed: int, width: int, count: int) -> None:
    """A stratified draw hits an id within two of count × share: catches cuts at ends of blocks."""
    torch.manual_seed(seed)
    masses = torch.rand(1, width) ** 8
    top = masses.topk(5).indices
    share = masses.double().scatter(1, top, 0.0)
    if share.sum() == 0:
        return
    share = share / share.sum()
    drawn = draw_tail(masses.clone(), top, count, torch.tensor([seed]))
    hits = torch.bincount(drawn.ids[0], minlength=width)
    assert ((hits - count * share[0]).abs() < 2 + 1e-4).all()
    assert (share[0][drawn.ids[0]] > 0).all()
    cumulated = share[0].cumsum(0)
    step = cumulated[drawn.ids[0]] * count  # the n-th draw lies in the n-th part
    assert (step > torch.arange(count) - 1e-4).all()
    assert (step - share[0][drawn.ids[0]] * count < torch.arange(1, count + 1) + 1e-4).all()


def test_draws_are_unbiased() -> None:
    """Catches draws that favor the start of a part: the mean number of hits is the share."""
    torch.manual_seed(0)
    masses = torch.rand(1, 300).expand(4000, -1).clone()
    top = masses.topk(5).indices
    share = masses[0].double().scatter(0, top[0], 0.0)
    drawn = draw_tail(masses, top, 16, seeds(4000)).ids
    hits = torch.bincount(drawn.flatten(), minlength=300) / drawn.numel()
    expected = share / share.sum()
    spread = (expected / drawn.numel()).sqrt()
    assert ((hits - expected).abs() <= 4.5 * spread).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_digests_tell_rows_apart(dtype: torch.dtype) -> None:
    """One bit, or two columns that changed places; −0 is 0."""
    row = torch.linspace(-2, 2, HIDDEN, dtype=dtype)
    row[3] = 0.0
    other, swapped, negative = row.clone(), row.clone(), row.clone()
    other[5] = (
        torch.nextafter(row[5], torch.tensor(9.0, dtype=dtype))
        if dtype.itemsize > 2
        else row[5] * 1.1
    )
    swapped[[0, 1]] = row[[1, 0]]
    negative[3] = -0.0
    found = digests(torch.stack([row, row, negative, other, swapped]))
    assert len(set(found[:3].tolist())) == 1
    assert len(set(found.tolist())) == 3
