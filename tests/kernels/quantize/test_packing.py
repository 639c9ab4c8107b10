"""Two codes per byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.quantize.packing import pack4, unpack4
from quantwatch_kernels.testing import VIEWS

codes = st.integers(1, 9).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-8, 7), min_size=width, max_size=width), min_size=1, max_size=5
    )
)


@settings(max_examples=80, deadline=None)
@given(codes)
def test_round_trip(rows: list[list[int]]) -> None:
    """Catches lost signs (bug log 12) and odd rows that lose their last code."""
    tensor = torch.tensor(rows, dtype=torch.int8)
    assert torch.equal(unpack4(pack4(tensor), tensor.shape[1]), tensor)


def test_golden_bytes() -> None:
    """Catches a swapped nibble order, which reads back plausible but wrong (bug log 11)."""
    packed = pack4(torch.tensor([[1, -8, 7, -1, 3]], dtype=torch.int8))
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[0x81, 0xF7, 0x03]]


@pytest.mark.parametrize("bad", [8, -9, 127])
def test_codes_out_of_range_are_refused(bad: int) -> None:
    """Catches a code that spills into its neighbour's nibble (bug log 10)."""
    with pytest.raises(ValueError, match="-8 … 7"):
        pack4(torch.tensor([[0, bad]], dtype=torch.int8))


@pytest.mark.parametrize("view", VIEWS)
def test_layout_does_not_matter(view: str) -> None:
    """Catches strides that are ignored."""
    tensor = VIEWS[view](torch.randint(-8, 8, (6, 10)).float()).to(torch.int8)
    assert torch.equal(pack4(tensor), pack4(tensor.clone()))


def test_wrong_width_is_named() -> None:
    """Catches codes read with another number of columns."""
    with pytest.raises(ValueError, match="uint8"):
        unpack4(torch.zeros(2, 3, dtype=torch.uint8), 7)


def test_nothing_to_pack() -> None:
    """Catches min() of an empty tensor."""
    assert unpack4(pack4(torch.zeros(0, 4, dtype=torch.int8)), 4).shape == (0, 4)
