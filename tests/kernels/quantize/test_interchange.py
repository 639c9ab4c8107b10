"""Other projects' layouts: golden words, both directions, and what they can't hold."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import QuantizedWeight, quantize_weight
from quantwatch_kernels.quantize.interchange.aten_int4 import aten_int4_differs, avx512_int4
from quantwatch_kernels.quantize.interchange.awq import from_awq, to_awq
from quantwatch_kernels.quantize.interchange.gguf_q4_0 import from_q4_0, to_q4_0
from quantwatch_kernels.quantize.interchange.gptq import GptqTensors, Version, from_gptq, to_gptq
from quantwatch_kernels.quantize.interchange.marlin import from_marlin, to_marlin
from quantwatch_kernels.quantize.interchange.words import INTERLEAVED, pack_words, unpack_words
from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, PerTensor, WeightSpec

HALF = torch.float16


def quantized(name: str, granularity: Any, rows: int, columns: int, **more: Any) -> QuantizedWeight:
    fmt = INT_FORMATS[name]
    zero = more.pop("zero", "none" if fmt.symmetric else "integer")
    spec = WeightSpec(fmt, granularity, zero, scale_dtype=more.pop("scale_dtype", HALF))
    generator = torch.Generator().manual_seed(rows * columns)
    return quantize_weight(torch.randn(rows, columns, generator=generator) + 0.3, spec)


def with_zeros(zeros: list[list[int]], codes: Tensor) -> QuantizedWeight:
    """uint4 in groups of 8, all scales 0.5."""
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(8), "integer", scale_dtype=HALF)
    zeros_NG = torch.tensor(zeros, dtype=torch.uint8)
    scales = torch.full(zeros_NG.shape, 0.5, dtype=HALF)
    return QuantizedWeight(codes.to(torch.uint8), QParams(scales, zeros_NG), spec)


# Words ------------------------------------------------------------------------------------------


@given(st.sampled_from([2, 4, 8]), st.integers(0, 3), st.integers(0, 5), st.integers(0, 99))
def test_words_come_back(bits: int, rows: int, words: int, seed: int) -> None:
    """Catches a sign bit that spreads (bug log 12), also for no codes at all."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, words * 32 // bits), generator=generator)
    order = INTERLEAVED if bits == 4 else None
    packed = pack_words(codes, bits, order)
    assert packed.shape == (rows, words)
    assert torch.equal(unpack_words(packed, bits, order).long(), codes)


@pytest.mark.parametrize("code", [16, -1])
def test_a_code_too_many_is_refused(code: int) -> None:
    """Catches a nibble that spills into its neighbour, or one that is cut to fit (bug log 10)."""
    codes = torch.full((8,), 7)
    codes[3] = code
    with pytest.raises(
        ValueError, match=f"lie in 0 … 15; these span {min(code, 7)} … {max(code, 7)}"
    ):
        pack_words(codes, 4)


def test_the_order_is_a_part_of_the_format() -> None:
    """Catches AWQ's order read as GPTQ's and the other way: an asymmetric vector (bug log 11)."""
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 15])
    assert pack_words(codes, 4).tolist() == [0xF7654321 - (1 << 32)]
    assert pack_words(codes, 4, INTERLEAVED).tolist() == [0xF6427531 - (1 << 32)]
    mixed = unpack_words(pack_words(codes, 4, INTERLEAVED), 4)
    assert mixed.tolist() == [1, 3, 5, 7, 2, 4, 6, 15]


def test_words_must_be_whole() -> None:
    """Catches codes that are padded into a word nobody asked for."""
    with pytest.raises(ValueError, match=r"12 codes of 4 bits don't fill int32 words; .* of 8"):
        pack_words(torch.zeros(12), 4)
    with pytest.raises(ValueError, match=r"words are int32; these are torch\.int64"):
        unpack_words(torch.zeros(1, dtype=torch.int64), 4)


# GPTQ -------------------------------------------------------------------------------------------


def gptq_by_definition(t: GptqTensors, bits: int, version: Version) -> Tensor:
    """w[n, k] with Python's integers, from the format's definition."""
    per_word, mask = 32 // bits, (1 << bits) - 1
    columns, rows = t.g_idx.numel(), t.scales.shape[1]
    values = torch.empty(rows, columns)
    for k in range(columns):
        group = int(t.g_idx[k])
        for n in range(rows):
            code = (int(t.qweight[k // per_word, n]) >> (bits * (k % per_word))) & mask
            stored = (int(t.qzeros[group, n // per_word]) >> (bits * (n % per_word))) & mask
            zero = (stored + 1) & mask if version == 1 else stored
            values[n, k] = (code - zero) * float(t.scales[group, n])
    return values


GPTQ_CASES = {
    "uint4 groups": ("uint4", PerGroup(16)),
    "uint4 short group": ("uint4", PerGroup(12)),
    "uint4 rows": ("uint4", PerChannel()),
    "uint2 matrix": ("uint2", PerTensor()),
    "uint8 groups": ("uint8", PerGroup(8)),
    "int4 groups": ("int4", PerGroup(16)),
    "int8 rows": ("int8", PerChannel()),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", GPTQ_CASES)
def test_gptq(name: str, version: Version) -> None:
    """Catches words, zeros or groups along the wrong axis, and codes that lose their sign."""
    fmt, granularity = GPTQ_CASES[name]
    weight = quantized(fmt, granularity, 16, 32)
    tensors = to_gptq(weight, version)
    bits = weight.spec.format.bits
    assert tensors.qweight.shape == (32 * bits // 32, 16)
    assert tensors.qzeros.shape == (tensors.scales.shape[0], 16 * bits // 32)
    assert torch.equal(gptq_by_definition(tensors, bits, version), weight.values)
    again = from_gptq(tensors, bits, version)
    assert again.order is None
    assert torch.equal(again.values, weight.values)
    back = to_gptq(again.weight, version)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def test_zero_points_of_the_two_versions() -> None:
    """Catches zero points off by one, and 0 − 1 that becomes 16 on the way back (bug log 9)."""
    zeros = [[0, 15]] + [[8, 1]] * 7
    weight = with_zeros(zeros, torch.arange(128).view(8, 16) % 16)
    first, second = to_gptq(weight, 1), to_gptq(weight, 2)
    assert [hex(int(w) & 0xFFFFFFFF) for w in first.qzeros.flatten()] == ["0x7777777f", "0xe"]
    assert [hex(int(w) & 0xFFFFFFFF) for w in second.qzeros.flatten()] == [
        "0x88888880",
        "0x1111111f",
    ]
    assert first.qzeros.tolist() == [[0x7777777F], [0x0000000E]]
    assert torch.equal(first.qweight, second.qweight)
    for tensors, version in ((first, 1), (second, 2)):
        back = from_gptq(tensors, 4, version).weight  # type: ignore[arg-type]
        assert back.qparams.zeros is not None
        assert back.qparams.zeros.tolist() == zeros
    wrong = from_gptq(first, 4, 2).values - weight.values
    assert set(wrong.flatten().tolist()) == {0.5, -7.5}  # a step up, or 15 down


def test_activation_order() -> None:
    """Catches columns with the scales of the groups they would be in without the order."""
    weight = quantized("uint4", PerGroup(8), 8, 32)
    tensors = to_gptq(weight, 2)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    shuffled = weight.codes[:, order]
    mixed = tensors._replace(
        qweight=pack_words(shuffled, 4).T.contiguous(), g_idx=tensors.g_idx[order]
    )
    read = from_gptq(mixed, 4, 2)
    assert read.order is not None
    assert torch.equal(read.values, weight.values[:, order])
    assert torch.equal(read.values, gptq_by_definition(mixed, 4, 2))
    x = torch.randn(3, 32)
    product = x[:, read.order] @ read.weight.values.T
    torch.testing.assert_close(product, x @ read.values.T)


def test_a_dead_group_is_zero() -> None:
    """Catches a zero scale that turns codes into garbage later (bug log 5)."""
    tensors = to_gptq(quantized("uint4", PerGroup(8), 8, 16), 1)
    tensors.scales[1] = 0
    read = from_gptq(tensors, 4, 1)
    assert torch.equal(read.values[:, 8:], torch.zeros(8, 8))
    assert (read.weight.qparams.scales > 0).all()
    assert torch.equal(read.values, gptq_by_definition(tensors, 4, 1))


# AWQ --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["uint4", "int4"])
@pytest.mark.parametrize("granularity", [PerGroup(8), PerChannel(), PerTensor()], ids=str)
def test_awq(fmt: str, granularity: Any) -> None:
    """Catches the linear order, the other axis, and zeros stored less 1."""
    weight = quantized(fmt, granularity, 16, 24)
    tensors = to_awq(weight)
    assert tensors.qweight.shape == (24, 2)
    size = 24 // tensors.scales.shape[0]
    for n, k in ((0, 0), (1, 5), (9, 23), (14, 8), (15, 17)):
        place = 4 * INTERLEAVED.index(n % 8)
        code = (int(tensors.qweight[k, n // 8]) >> place) & 15
        zero = (int(tensors.qzeros[k // size, n // 8]) >> place) & 15
        value = (code - zero) * float(tensors.scales[k // size, n])
        assert value == weight.values[n, k].item()
    again = from_awq(tensors)
    assert torch.equal(again.values, weight.values)
    assert all(torch.equal(a, b) for a, b in zip(to_awq(again), tensors, strict=True))


def test_awq_golden() -> None:
    """Catches outputs 1 and 4 exchanged, which a symmetric test wouldn't show (bug log 11)."""
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]]).T.expand(8, 8)
    weight = with_zeros([[0], [1], [2], [3], [4], [5], [6], [7]], codes)
    tensors = to_awq(weight)
    assert tensors.qweight[0].tolist() == [0xF6427531 - (1 << 32)]
    assert tensors.qzeros[0].tolist() == [0x75316420]


# GGUF Q4_0 --------------------------------------------------------------------------------------


def test_q4_0_golden() -> None:
    """Catches neighbours in one byte, which is our own order: here it is j and j + 16."""
    weight = torch.zeros(1, 32)
    weight[0, [0, 1, 16, 17]] = torch.tensor([7.0, -7, 1, 2])
    spec = WeightSpec(INT_FORMATS["int4"], PerGroup(32), scale_dtype=HALF)
    row = to_q4_0(quantize_weight(weight, spec))[0].tolist()
    assert row == [0x00, 0x3C, 0x9F, 0xA1] + [0x88] * 14


def test_q4_0_is_what_gguf_reads() -> None:
    """Catches any disagreement with the package that GGUF files are read with, both ways."""
    weight = quantized("int4", PerGroup(32), 5, 96)
    blocks = to_q4_0(weight)
    kind = GGMLQuantizationType.Q4_0
    assert np.array_equal(gguf_dequantize(blocks.numpy(), kind), weight.values.numpy())
    assert torch.equal(from_q4_0(blocks).values, weight.values)
    floats = np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32)
    theirs = torch.from_numpy(gguf_quantize(floats, kind))
    read = from_q4_0(theirs)
    assert (read.qparams.scales < 0).any()  # d keeps its sign
    assert np.array_equal(read.values.numpy(), gguf_dequantize(theirs.numpy(), kind))
    assert torch.equal(to_q4_0(read), theirs)


# Marlin -----------------------------------------------------------------------------------------

# (input k, output n) → (row of words, word, nibble).
PLACES = {
    (0, 0): (0, 0, 0),
    (1, 0): (0, 0, 4),
    (8, 0): (0, 0, 1),
    (9, 0): (0, 0, 5),
    (0, 8): (0, 0, 2),
    (2, 0): (0, 4, 0),
    (0, 1): (0, 16, 0),
    (0, 16): (0, 1, 0),
    (15, 48): (0, 15, 5),
    (15, 63): (0, 127, 7),
    (16, 0): (1, 0, 0),
    (0, 64): (0, 128, 0),
}


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_marlin_places(place: tuple[int, int]) -> None:
    """Catches a thread that would load another thread's codes. Positions are derived by hand."""
    (k, n), (row, word, nibble) = place, PLACES[place]
    weight = quantized("int4", PerChannel(), 128, 32)
    weight.codes.fill_(-7)
    weight.codes[n, k] = 7
    words = to_marlin(weight).words.long() & 0xFFFFFFFF
    expected = torch.full((2, 256), 0x11111111)
    expected[row, word] += 14 << (4 * nibble)
    assert torch.equal(words, expected)


@pytest.mark.parametrize("granularity", [PerGroup(16), PerChannel()], ids=str)
def test_marlin_comes_back(granularity: Any) -> None:
    """Catches a permutation that loses a code or a scale."""
    weight = quantized("int4", granularity, 192, 48)
    grouped = isinstance(granularity, PerGroup)
    codes, scales = from_marlin(to_marlin(weight), grouped=grouped)
    assert torch.equal(codes, weight.codes)
    assert torch.equal(scales, weight.qparams.scales)


def test_marlin_scales() -> None:
    """Catches scales in another order than the accumulators'. First eight of each kind by hand."""
    weight = quantized("int4", PerGroup(16), 64, 16)
    weight.qparams.scales[:, 0] = torch.arange(1, 65).to(HALF)
    assert to_marlin(weight).scales[0, :8].tolist() == [1, 9, 17, 25, 33, 41, 49, 57]
    weight = quantized("int4", PerChannel(), 64, 16)
    weight.qparams.scales[:, 0] = torch.arange(64).to(HALF)
    assert to_marlin(weight).scales[0, :10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]


# aten -------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="describes the AVX512 layout"
)
@pytest.mark.parametrize("rows", [16, 48, 64, 80, 192])
def test_aten_int4_layout(rows: int) -> None:
    """Catches a torch that packs otherwise than we describe; whole blocks and the tail."""
    assert aten_int4_differs() is None
    codes = torch.randint(0, 16, (rows, 32), generator=torch.Generator().manual_seed(rows))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    assert torch.equal(packed.view(rows, 16), avx512_int4(codes))


def test_avx512_golden() -> None:
    """Catches neighbours in one byte: rows 0 and 32 share one, in the tail rows 0 and 1."""
    codes = torch.zeros(80, 2, dtype=torch.int64)
    codes[0, 0], codes[32, 0], codes[63, 1] = 1, 2, 3
    codes[64, 0], codes[65, 0], codes[79, 1] = 4, 5, 6
    flat = avx512_int4(codes).flatten()
    assert flat[0] == 0x21
    assert flat[63] == 0x30
    assert flat[64] == 0x54
    assert flat[79] == 0x60
    assert flat.count_nonzero() == 4


# Bad input --------------------------------------------------------------------------------------

GOOD = to_gptq(quantized("uint4", PerGroup(8), 8, 32), 1)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "gptq 3 bits": (lambda: to_gptq(quantized("uint3", PerGroup(8), 8, 32), 1), "2, 4, 8 bits; .* 3"),
    "gptq float zero": (
        lambda: to_gptq(quantized("uint4", PerGroup(8), 8, 32, zero="float"), 1),
        "GPTQ holds whole zero points; these are floats",
    ),
    "gptq float32 scales": (
        lambda: to_gptq(quantized("uint4", PerGroup(8), 8, 32, scale_dtype=torch.float32), 1),
        "GPTQ holds float16 scales and these don't fit",
    ),
    "gptq odd outputs": (
        lambda: to_gptq(quantized("uint4", PerGroup(8), 9, 32), 1),
        "9 codes of 4 bits don't fill int32 words",
    ),
    "gptq version": (lambda: from_gptq(GOOD, 4, 3), "version 1 .* or 2; not 3"),  # type: ignore[arg-type]
    "gptq read 3 bits": (lambda: from_gptq(GOOD, 3, 1), "2, 4 or 8 bits; not 3"),
    "gptq other bits": (lambda: from_gptq(GOOD, 8, 1), "don't belong to one weight"),
    "gptq negative scales": (
        lambda: from_gptq(GOOD._replace(scales=-GOOD.scales), 4, 1),
        "scales are positive; the smallest is -",
    ),
    "gptq uneven groups": (
        lambda: from_gptq(GOOD._replace(g_idx=GOOD.g_idx.clamp(max=2)), 4, 1),
        r"4 groups of equal size are wanted; g_idx has \[8, 8, 16, 0\]",
    ),
    "awq 8 bits": (lambda: to_awq(quantized("uint8", PerGroup(8), 8, 32)), "codes of 4 bits; .* 8"),
    "awq short group": (
        lambda: to_awq(quantized("uint4", PerGroup(12), 8, 32)),
        "AWQ has no short last group; 32 inputs by 12 leave one",
    ),
    "q4_0 groups": (lambda: to_q4_0(quantized("int4", PerGroup(16), 8, 32)), "blocks of 32; .* 16"),
    "q4_0 zeros": (
        lambda: to_q4_0(quantized("uint4", PerGroup(32), 8, 32)),
        "Q4_0 has the zero point 8; these reach",
    ),
    "q4_0 bytes": (
        lambda: from_q4_0(torch.zeros(2, 17, dtype=torch.uint8)),
        r"uint8 \[N, multiple of 18\]; got torch.uint8 \[2, 17\]",
    ),
    "marlin uint4": (
        lambda: to_marlin(quantized("uint4", PerGroup(16), 64, 32)),
        "symmetric 4-bit codes; these are uint4",
    ),
    "marlin outputs": (
        lambda: to_marlin(quantized("int4", PerGroup(16), 32, 32)),
        "16 inputs by 64 outputs; this weight has 32 by 32",
    ),
    "aten rows": (lambda: avx512_int4(torch.zeros(8, 2)), "rows by 16 .* this is 8 × 2"),
    "aten codes": (lambda: avx512_int4(torch.full((16, 2), -1)), "0 … 15; these span -1 … -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_can_not_hold(name: str) -> None:
    """Catches a checkpoint that is written although its reader would see another weight."""
    act, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        act()
