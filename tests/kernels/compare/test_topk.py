"""The K largest logits, exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.compare.topk import top_k

SHAPES = [(1, 1), (3, 5), (2, 63), (2, 64), (4, 65), (5, 129), (3, 1000), (2, 5000)]


def by_sorting(z: torch.Tensor, k: int) -> torch.Tensor:
    return z.sort(dim=-1, descending=True, stable=True)[1][:, :k]


@pytest.mark.parametrize("k", [1, 5, 10])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_a_stable_sort(shape: tuple[int, int], k: int) -> None:
    """Catches a tail block that is dropped, or ids beyond the vocabulary."""
    z = torch.randn(shape)
    assert torch.equal(top_k(z, k), by_sorting(z, k))


@settings(max_examples=60)
@given(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 1.0, 2.0]), min_size=1, max_size=400))
def test_lowest_id_wins_ties(values: list[float]) -> None:
    """Catches ties broken by memory order, within a block and between blocks; −0 ties with 0."""
    z = torch.tensor([values])
    assert torch.equal(top_k(z, 10), by_sorting(z, 10))


def test_minus_infinity_is_the_last() -> None:
    """Catches a padding key that beats a masked logit."""
    z = torch.full((1, 70), -torch.inf)
    z[0, 69] = -1e30
    assert top_k(z, 3).tolist() == [[69, 0, 1]]


def test_no_rows() -> None:
    """Catches a crash on an empty batch."""
    assert top_k(torch.zeros(0, 300), 10).shape == (0, 10)


def test_layout_does_not_matter() -> None:
    """Catches block maxima that assume contiguous rows."""
    z = torch.randn(300, 4)
    assert torch.equal(top_k(z.T, 5), by_sorting(z.T.contiguous(), 5))
