"""Pages of codes: every byte in its place, every number the one that a cache would restore."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.serve.block_pool import BlockPool
from quantwatch_kernels.serve.block_table import BlockTable
from quantwatch_kernels.serve.host_tier import HostTensors
from quantwatch_kernels.serve.kv_pages import ALIGNMENT, PageShape, QuantizedPages
from quantwatch_kernels.serve.kv_plane import PlaneScheme
from quantwatch_kernels.serve.kv_policy import KVScheme
from quantwatch_kernels.serve.kv_quant import restore, store
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.paged_attention import paged_attention
from quantwatch_kernels.serve.paged_plan import plan
from quantwatch_kernels.serve.swap import PageBytes, SwapSpace

SHAPE = PageShape(4, 3, 32)
NAMES = ("int8", "int8-symmetric", "int4", "int4-hadamard", "int4-symmetric", "int2-plain")
MIXED = KVScheme(PlaneScheme(5, group=12), PlaneScheme(3, symmetric=True))
SCHEMES = {name: scheme_named(name) for name in NAMES} | {"5 and 3 bits": MIXED}
each = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())


def numbers(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(tokens, 3, 32, generator=generator) for _ in range(2))
    keys[..., 5] += 9
    return keys, values


def as_a_cache(x_THD: Tensor, plane: PlaneScheme) -> Tensor:
    x = x_THD.transpose(0, 1)[None]
    return restore(store(x, plane), plane)[0].transpose(0, 1)


@each
@pytest.mark.parametrize("step", [1, 3, 10])
def test_what_is_read_is_what_a_cache_restores(scheme: KVScheme, step: int) -> None:
    """Catches nibbles shared by tokens, scales of another head, zeros read without their group."""
    pages = QuantizedPages(6, SHAPE, scheme)
    pages.memory.fill_(255)  # NaN as a float16 scale
    keys, values = numbers(10)
    slots = torch.tensor([9, 4, 22, 23, 8, 5, 15, 20, 11, 7])
    for begin in range(0, 10, step):
        part = slice(begin, begin + step)
        pages.write(slots[part], keys[part], values[part])
    found = pages.read(slots)
    for x, plane, restored in zip((keys, values), (scheme.keys, scheme.values), found, strict=True):
        assert torch.equal(restored, as_a_cache(x, plane))


@each
def test_planes_are_aligned_and_counted(scheme: KVScheme) -> None:
    """Catches a plane off its cache line, and bytes that are counted less than they are."""
    pages = QuantizedPages(3, SHAPE, scheme)
    assert pages.memory.shape == (3, pages.page_bytes)
    assert pages.memory.data_ptr() % ALIGNMENT == 0
    assert pages.page_bytes % ALIGNMENT == 0
    assert len(pages.offsets) == 6
    assert all(offset % ALIGNMENT == 0 for offset in pages.offsets)
    bits = sum(plane.num_bits(1, 32) for plane in (scheme.keys, scheme.values))
    # Zeros are counted by the bit there and end on a byte with each token here.
    assert 3 * bits <= 8 * pages.token_bytes < 3 * bits + 16
    assert pages.bits_per_element == 8 * pages.page_bytes / (2 * 4 * 3 * 32)


def test_the_bytes_of_a_page_by_hand() -> None:
    """Catches zeros of a byte, float32 scales and padding that is forgotten."""
    # SmolLM2: 3 heads of 64 features; 32 tokens.
    pages = QuantizedPages(2, PageShape(32, 3, 64), scheme_named("int4-hadamard"))
    codes, scales, zeros = 32 * 3 * 32, 32 * 3 * 2, 32 * 2  # 3 nibbles end on 2 bytes
    assert (codes % 64, scales % 64, zeros % 64) == (0, 0, 0)
    assert pages.page_bytes == 2 * (codes + scales + zeros) == 6656
    assert pages.offsets == (0, 3072, 3264, 3328, 6400, 6592)
    assert 16 / pages.bits_per_element == pytest.approx(3.692, abs=1e-3)
    # 16 tokens: 96 bytes of scales and 32 of zeros are padded.
    assert QuantizedPages(2, PageShape(16, 3, 64), scheme_named("int4-hadamard")).page_bytes == (
        2 * (1536 + 128 + 64)
    )
    eight = QuantizedPages(2, PageShape(32, 3, 64), scheme_named("int8-symmetric"))
    assert eight.page_bytes == 2 * (32 * 3 * 64 + 192)
    assert 16 / eight.bits_per_element > 1.88


def test_codes_in_memory_by_hand() -> None:
    """Catches another nibble order, and a zero point in the wrong half of its byte."""
    scheme = KVScheme(PlaneScheme(4), PlaneScheme(4))
    pages = QuantizedPages(2, PageShape(2, 2, 4), scheme)
    keys = torch.tensor([[[0.0, 1, 2, 15], [-15.0, 0, -1, -2]]])
    pages.write(torch.tensor([3]), keys, keys)
    page = pages.memory[1]
    assert page[4:8].tolist() == [0x10, 0xF2, 0xF0, 0xDE]
    scales, zeros = pages.offsets[1:3]
    assert page[scales + 4 : scales + 8].view(torch.float16).tolist() == [1.0, 1.0]
    assert int(page[zeros + 1]) == 0xF0


def paged(scheme: KVScheme, poison: int) -> Tensor:
    """Attention over two sequences of 9 and 4 tokens in pages that held something before."""
    pages = QuantizedPages(8, SHAPE, scheme)
    pages.memory.fill_(poison)
    tables = []
    for number, tokens in enumerate((9, 4)):
        table = BlockTable(4)
        table.append([[5, 2, 7], [3]][number], tokens)
        pages.write(table.slot_mapping(0, tokens), *numbers(tokens, number))
        tables.append(table)
    queries = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(9))
    found, listed = pages.gather(plan(tables, 4))
    return paged_attention(queries, torch.tensor([0, 2, 3]), found, listed).out


@each
def test_a_stale_page_harms_nobody(scheme: KVScheme) -> None:
    """Catches NaN from what a page held before: scales of all ones are NaN."""
    found = paged(scheme, 255)
    assert found.isfinite().all()
    assert torch.equal(found, paged(scheme, 0))
    pages = QuantizedPages(2, SHAPE, scheme)
    pages.memory.fill_(255)
    assert pages.read(torch.tensor([4]))[0].isnan().all()


@each
def test_attention_over_pages_is_attention_over_codes(scheme: KVScheme) -> None:
    """Catches pages in another order than the plan's."""
    queries = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(9))
    out = paged(scheme, 7)
    begin = 0
    for number, (tokens, count) in enumerate(((9, 2), (4, 1))):
        keys, values = (
            as_a_cache(x, p).double().repeat_interleave(2, 1)
            for x, p in zip(numbers(tokens, number), (scheme.keys, scheme.values), strict=True)
        )
        for i in range(count):
            seen = tokens - count + i + 1
            scores = torch.einsum("hd,thd->ht", queries[begin + i].double(), keys[:seen]) / 32**0.5
            expected = torch.einsum("ht,thd->hd", scores.softmax(-1), values[:seen])
            assert torch.allclose(out[begin + i].double(), expected, atol=1e-5)
        begin += count


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 3e38, -1e9])
@pytest.mark.parametrize("scheme", ["int4-hadamard", "int8-symmetric", "int4-plain", "int4"])
def test_a_broken_number_stays_visible_and_alone(scheme: str, broken: float) -> None:
    """Catches a NaN, or what no 16-bit scale can hold, that becomes a code or spoils another."""
    pages = QuantizedPages(3, SHAPE, scheme_named(scheme))
    keys, values = numbers(5)
    keys[2, 1, 7] = broken
    pages.write(torch.arange(4, 9), keys, values)
    found, other = pages.read(torch.arange(4, 9))
    assert found[2, 1].isnan().all()
    found[2, 1] = 0
    assert found.isfinite().all()
    assert other.isfinite().all()


@pytest.mark.parametrize("value", [1e-7, -3e-9, 0.0, 6e-5])
def test_numbers_below_a_16_bit_scale(value: float) -> None:
    """Catches a scale that underflows to 0 and turns a token into NaN."""
    pages = QuantizedPages(2, SHAPE, scheme_named("int8-symmetric"))
    x = torch.full((1, 3, 32), value)
    pages.write(torch.tensor([4]), x, x)
    assert (pages.read(torch.tensor([4]))[0] - x).abs().max() < 1e-5


def test_swapped_pages_come_back_bit_for_bit() -> None:
    """Catches scales that stay behind when a page is swapped."""
    pages, pool = QuantizedPages(8, SHAPE, MIXED), BlockPool(8)
    space = PageBytes([pages.memory])
    assert space.page_bytes == pages.page_bytes
    swap = SwapSpace(HostTensors(4, pages.page_bytes), space)
    table = BlockTable(4)
    table.append(pool.take(2), 6)
    pages.write(table.slot_mapping(0, 6), *numbers(6))
    before = pages.read(table.slot_mapping(0, 6))
    swapped = swap.swap_out(table.blocks, pool)
    pages.memory.fill_(255)
    table.rebind(swap.swap_in(swapped, pool))
    for one, other in zip(before, pages.read(table.slot_mapping(0, 6)), strict=True):
        assert torch.equal(one, other)


def test_padding_is_skipped_and_nothing_is_an_error() -> None:
    """Catches slot −1 that writes into the last page, and an empty batch."""
    pages = QuantizedPages(3, SHAPE, MIXED)
    pages.memory.fill_(1)
    pages.write(torch.tensor([-1, -1]), *numbers(2))
    pages.write(torch.empty(0, dtype=torch.int64), *numbers(0))
    assert (pages.memory == 1).all()
    assert pages.read(torch.empty(0, dtype=torch.int64))[0].shape == (0, 3, 32)


def test_refused() -> None:
    """Catches what would be stored wrong without a word, and a write that is half done."""
    pages = QuantizedPages(3, SHAPE, MIXED)
    keys, values = numbers(2)
    pages.write(torch.tensor([4, 5]), keys, values)
    before = pages.memory.clone()
    cases: dict[str, Any] = {
        "a slot comes twice": lambda: pages.write(torch.tensor([4, 4]), keys, values),
        "in the null block": lambda: pages.write(torch.tensor([3, 4]), keys, values),
        "slots lie in 0 … 11": lambda: pages.write(torch.tensor([3, 12]), keys, values),
        "2 slots take keys and values": lambda: pages.write(torch.tensor([4, 5]), keys, values[:1]),
        "pages of 8 tokens; these have 4": lambda: pages.gather(plan([], 8)),
        "every token by itself": lambda: QuantizedPages(3, SHAPE, scheme_named("kivi4")),
        "every token by itself: no": lambda: QuantizedPages(3, SHAPE, replace(MIXED, sinks=1)),
        "no 16-bit floats": lambda: QuantizedPages(3, SHAPE, scheme_named("float16")),
        "at least 1 page": lambda: QuantizedPages(0, SHAPE, MIXED),
        "a page has tokens": lambda: PageShape(0, 3, 32),
    }
    for said, make in cases.items():
        with pytest.raises(ValueError, match=said):
            make()
    assert torch.equal(pages.memory, before)
