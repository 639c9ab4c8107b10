"""Codes of any width, packed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.formats import INT4, INT_FORMATS, IntFormat
from quantwatch_kernels.quantize.packing import pack, unpack
from quantwatch_kernels.testing import VIEWS

formats = st.sampled_from(list(INT_FORMATS.values()))


@settings(max_examples=120)
@given(formats, st.integers(0, 4), st.integers(1, 19), st.integers(0, 99))
def test_round_trip(fmt: IntFormat, rows: int, columns: int, seed: int) -> None:
    """Catches lost signs (bug log 12) and rows that lose what doesn't fill a byte."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(fmt.qmin, fmt.qmax + 1, (rows, columns), generator=generator)
    packed = pack(codes.to(fmt.storage), fmt)
    assert packed.shape == (rows, -(-columns * fmt.bits // 8))
    assert packed.numel() == fmt.num_bytes(rows, columns)
    assert torch.equal(unpack(packed, fmt, columns), codes.to(fmt.storage))


GOLDEN = {
    "int4": ([1, -7, 7, -1, 3], [0x91, 0xF7, 0x03]),
    "uint4": ([1, 8, 7, 15, 3], [0x81, 0xF7, 0x03]),
    "uint2": ([0, 1, 2, 3, 1], [0b11100100, 0b01]),
    "uint3": ([1, 2, 3], [0b11010001, 0b0]),
    "uint5": ([31, 0, 1], [0b00011111, 0b00000100]),
    "uint6": ([63, 1], [0b01111111, 0b0000]),
    "int8": ([-127, 127, 0], [0x81, 0x7F, 0x00]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    """Catches a swapped nibble or bit order, which reads back plausible but wrong (bug log 11)."""
    codes, expected = GOLDEN[name]
    packed = pack(torch.tensor([codes]).to(INT_FORMATS[name].storage), INT_FORMATS[name])
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [expected]


@pytest.mark.parametrize("bad", [8, -8, 127])
def test_codes_out_of_range_are_refused(bad: int) -> None:
    """Catches a code that spills into its neighbour's nibble (bug log 10)."""
    with pytest.raises(ValueError, match="-7 … 7"):
        pack(torch.tensor([[0, bad]], dtype=torch.int8), INT4)


@pytest.mark.parametrize("view", VIEWS)
def test_layout_does_not_matter(view: str) -> None:
    """Catches strides that are ignored."""
    tensor = VIEWS[view](torch.randint(-7, 8, (6, 10)).float()).to(torch.int8)
    assert torch.equal(pack(tensor, INT4), pack(tensor.clone(), INT4))


def test_wrong_width_is_named() -> None:
    """Catches codes read with another number of columns."""
    with pytest.raises(ValueError, match="uint8"):
        unpack(torch.zeros(2, 3, dtype=torch.uint8), INT4, 7)


def test_nothing_to_pack() -> None:
    """Catches min() of an empty tensor."""
    assert unpack(pack(torch.zeros(0, 4, dtype=torch.int8), INT4), INT4, 4).shape == (0, 4)
