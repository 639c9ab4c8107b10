"""Codes in int32 words, and what the layouts that use them have in common.

Code i of a word takes bits i·b … (i + 1)·b − 1. Which code that is, is a part of each format: AWQ
and Marlin interleave, GPTQ doesn't; read in the other's order a weight looks plausible and is wrong
(bug log 11). A code or zero point that needs more bits than it has is refused: masked it would be
another number, and unmasked it would spill into its neighbour (bug log 10).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.recipe import Granularity, PerChannel, PerGroup

__all__ = [
    "INTERLEAVED",
    "check_whole_groups",
    "float16_exactly",
    "granularity_of",
    "pack_words",
    "unpack_words",
    "unsigned",
]

INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ and Marlin: bits 4i … 4i + 3 of a word hold code INTERLEAVED[i] of its eight."""


def pack_words(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Pack codes 0 … 2^bits − 1 [.., n] into int32 [.., n·bits/32].

    Raises ValueError for a code out of range, or codes that don't fill whole words.
    """
    per_word = 32 // bits
    if codes.shape[-1] % per_word:
        raise ValueError(
            f"{codes.shape[-1]} codes of {bits} bits don't fill int32 words; "
            f"allowed: multiples of {per_word}."
        )
    wide = codes.to(torch.int64)
    if wide.numel() and not 0 <= int(wide.min()) <= int(wide.max()) < 1 << bits:
        raise ValueError(
            f"codes of {bits} bits lie in 0 … {(1 << bits) - 1}; "
            f"these span {int(wide.min())} … {int(wide.max())}."
        )
    wide = wide.reshape(*wide.shape[:-1], wide.shape[-1] // per_word, per_word)
    if order is not None:
        wide = wide[..., list(order)]
    words = (wide << torch.arange(0, 32, bits, device=wide.device)).sum(-1)
    # The upper half of the unsigned words are the negative ones of int32.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the codes uint8 [.., n] of int32 words [.., n·bits/32]."""
    if words.dtype != torch.int32:
        raise ValueError(f"words are int32; these are {words.dtype}.")
    # Masked after the shift, which repeats the sign bit (bug log 12).
    codes = (
        words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    ) & ((1 << bits) - 1)
    if order is not None:
        inverse = sorted(range(len(order)), key=lambda position: order[position])
        codes = codes[..., inverse]
    return codes.to(torch.uint8).flatten(-2)


def unsigned(weight: QuantizedWeight, allowed: Sequence[int], what: str) -> tuple[Tensor, Tensor]:
    """Return codes and zeros as int16 0 … 2^b − 1: [N, K], [N, G]; symmetric ones are shifted.

    Raises ValueError for a width that the format `what` doesn't have, and for float zeros.
    """
    fmt, zeros = weight.spec.format, weight.qparams.zeros
    if fmt.bits not in allowed:
        widths = ", ".join(map(str, allowed))
        raise ValueError(f"{what} holds codes of {widths} bits; these have {fmt.bits}.")
    if weight.spec.zero == "float":
        raise ValueError(f"{what} holds whole zero points; these are floats.")
    half = 1 << (fmt.bits - 1)
    if zeros is None:
        shifted = weight.codes.to(torch.int16) + half
        return shifted, torch.full_like(weight.qparams.scales, half, dtype=torch.int16)
    return weight.codes.to(torch.int16), zeros.to(torch.int16)


def check_whole_groups(weight: QuantizedWeight, what: str) -> None:
    """Raise ValueError for a short last group, which the format `what` doesn't have."""
    columns = weight.codes.shape[1]
    size = weight.spec.granularity.group_size(columns)
    if columns % size:
        raise ValueError(f"{what} has no short last group; {columns} inputs by {size} leave one.")


def granularity_of(columns: int, num_groups: int, size: int) -> Granularity:
    """Return one scale per row, or per `size` inputs."""
    return PerChannel() if num_groups == 1 else PerGroup(min(size, columns))


def float16_exactly(scales: Tensor, what: str) -> Tensor:
    """Return the scales as float16; raises ValueError when that would change one."""
    half = scales.to(torch.float16)
    if not torch.equal(half.float(), scales.float()):
        raise ValueError(
            f"{what} holds float16 scales and these don't fit: quantize with scale_dtype = float16."
        )
    return half
