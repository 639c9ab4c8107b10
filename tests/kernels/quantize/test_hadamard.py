"""Hadamard matrices exist where they should, and the fast product is the dense one."""

from typing import Any

import pytest
import torch

from quantwatch_kernels.quantize.hadamard import (
    Hadamard,
    Inverse,
    hadamard_base,
    hadamard_matrix,
)
from quantwatch_kernels.testing import VIEWS, assert_close

ORDERS = [1, 2, 4, 12, 20, 28, 36, 40, 52, 60, 64, 76, 108, 140, 344]
WIDTHS = {576: 36, 1536: 12, 896: 28, 2304: 36, 4864: 76, 8960: 140, 11008: 344}


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_orthogonal(order: int) -> None:
    """Catches a wrong Paley core, 52 over the integers mod 25 instead of the field, 344 = 7³ + 1."""
    matrix = hadamard_matrix(order).long()
    assert matrix.abs().eq(1).all()
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.int64))


@pytest.mark.parametrize(("width", "base"), WIDTHS.items())
def test_widths_of_real_models(width: int, base: int) -> None:
    """Catches 576 and 1536 refused as no power of two (QuaRot#41, SpinQuant#33)."""
    assert hadamard_base(width) == base


@pytest.mark.parametrize("width", [1, 2, 12, 36, 40, 52, 64, 128, 576, 1536])
@pytest.mark.parametrize("seed", [None, 3])
def test_fast_product_is_the_dense_one(width: int, seed: int | None) -> None:
    """Catches a transposed factor (bases aren't symmetric) and factors in the wrong order."""
    rotation = Hadamard(width, seed)
    x = torch.randn(2, 3, width, dtype=torch.float64)
    assert_close(rotation(x), x @ rotation.matrix(), rtol=0, atol=1e-12)
    assert_close(rotation.inverse(x), x @ rotation.matrix().T, rtol=0, atol=1e-12)
    assert_close(Inverse(rotation)(rotation(x)), x, rtol=0, atol=1e-12)


def test_blocks_stay_apart() -> None:
    """Catches a block-diagonal rotation that mixes neighbours, or signs of the first block only."""
    rotation = Hadamard(576, 5, block=64)
    x = torch.zeros(576, dtype=torch.float64)
    x[70] = 1
    y = rotation(x)
    assert set(y.nonzero().flatten().tolist()) == set(range(64, 128))
    x = torch.randn(4, 576, dtype=torch.float64)
    assert_close(rotation(x), x @ rotation.matrix(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "eps"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_dtypes_and_views(dtype: torch.dtype, eps: float, view: Any) -> None:
    """Catches sums in 16 bits, and a reshape that ignores strides (bug log 18)."""
    rotation = Hadamard(96, 1)
    x = view(torch.randn(5, 96).to(dtype))
    y = rotation(x)
    assert y.dtype == dtype
    assert_close(y, x.double() @ rotation.matrix(), rtol=eps, atol=2e-6)
    assert rotation.inverse(x).dtype == dtype


def test_seeds() -> None:
    assert torch.equal(Hadamard(64, 1).signs, Hadamard(64, 1).signs)
    assert not torch.equal(Hadamard(64, 1).signs, Hadamard(64, 2).signs)


def test_empty_batch() -> None:
    """Catches a reshape of nothing (bug log 20)."""
    assert Hadamard(36)(torch.empty(0, 36)).shape == (0, 36)


@pytest.mark.parametrize("width", [172, 18, 6, 0, -4])
def test_widths_without_a_matrix(width: int) -> None:
    with pytest.raises(ValueError, match=f"no Hadamard matrix of order {width} can be constructed"):
        hadamard_base(width)


def test_wrong_widths() -> None:
    with pytest.raises(ValueError, match=r"blocks of 64 don't fill a width of 100"):
        Hadamard(100, block=64)
    with pytest.raises(ValueError, match=r"width 36 was given \[2, 40\]"):
        Hadamard(36)(torch.ones(2, 40))
