"""Vectors moved by a distance on the grid of their dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantwatch_kernels.quantize import displaced as module
from quantwatch_kernels.quantize.displaced import displaced

DTYPES = {t: str(t).removeprefix("torch.") for t in (torch.bfloat16, torch.float16, torch.float32)}


def _moved(y: torch.Tensor, distance: torch.Tensor, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return displaced(y, torch.randn(y.shape), distance)


@given(seed=st.integers(0, 100), exponent=st.integers(-20, 8), dtype=st.sampled_from([*DTYPES]))
def test_the_distance_is_met_but_for_half_a_step(
    seed: int, exponent: int, dtype: torch.dtype
) -> None:
    """Catches a search that ends elsewhere: the next distance is one coordinate's step away."""
    torch.manual_seed(seed)
    y = (torch.randn(5, 16) * torch.logspace(-2, 2, 16)).to(dtype)
    distance = torch.full((5,), 2.0**exponent, dtype=torch.float64)
    found = _moved(y, distance, seed).double()
    step = torch.maximum(y.double().abs(), found.abs()).amax(-1) * torch.finfo(dtype).eps
    off = ((found - y.double()).norm(dim=-1) - distance).abs()
    assert (off <= step / 2 + 1e-3 * distance).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
def test_nothing_and_far(dtype: torch.dtype) -> None:
    """Catches rounding where there is nothing to add, and a distance that isn't that of its row."""
    y = torch.linspace(-3, 3, 4 * 256).view(2, 2, 256).to(dtype)
    distance = torch.tensor([[0.0, 8.0], [2.0, 0.5]])
    found = _moved(y, distance)
    assert found.dtype == dtype
    assert torch.equal(found[0, 0], y[0, 0])
    by = (found.double() - y.double()).norm(dim=-1)
    torch.testing.assert_close(by, distance.double(), rtol=2e-3, atol=0)


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows that are left out where not all fit at once."""
    y, distance = torch.randn(7, 3, 10).bfloat16(), torch.rand(7, 3) * 0.01
    whole = _moved(y, distance)
    monkeypatch.setattr(module, "_ROWS_BYTES", 4 * 10 * 8)
    assert torch.equal(_moved(y, distance), whole)
