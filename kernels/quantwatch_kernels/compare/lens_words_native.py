"""The lens in one pass with products of our own (`lens_words.h`, then `lens.cpp`).

The head is rounded, if it is, where it is multiplied, 48 ids at a time: no second copy of it is
kept. n rows, H hidden width, V ids.
"""

import ctypes
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantwatch_kernels.compare.lens_native import add_up, why_not_native
from quantwatch_kernels.compare.readout import Readout
from quantwatch_kernels.compare.rounding import BLOCK, Factors
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.native import library, why_not_built

__all__ = ["COLUMNS", "PAIRS", "WORDS", "fused_word_sums", "products", "suits_cpu", "why_not_words"]

_FLAGS = ("-ffp-contract=fast", "-fno-trapping-math")
PAIRS = 512
"""Rows per call: the head is put into words once for so many."""
COLUMNS = 480
"""Ids per piece and thread, a multiple of the kernel's 48."""
_PANEL, _ROWS = 48, 8
"""Ids and rows that the kernel does at a time."""


@dataclass(frozen=True, slots=True)
class _Words:
    block: int
    """Words of 32 bits per block of inputs: one factor or two each, and the step of int16."""
    instructions: str


WORDS: Mapping[Factors, _Words] = MappingProxyType(
    {
        "float32": _Words(32, "avx512f"),
        "bfloat16": _Words(16, "avx512_bf16"),
        "int16": _Words(17, "avx512_vnni"),
    }
)
"""What there are kernels for."""


@functools.cache
def why_not_words(factors: Factors) -> str | None:
    """Say why products of such factors can't be computed so in this process, None when they can."""
    if reason := why_not_native() or why_not_built(_source(factors), *_FLAGS):
        return reason
    if not suits_cpu(factors):
        named = WORDS[factors].instructions
        return f"this CPU has no {named}, or its C++ compiler doesn't know it"
    return None


@functools.cache
def suits_cpu(factors: Factors) -> bool:
    """Say whether this CPU has the instructions, as far as a compiler says: True without one."""
    source = _source(factors)
    return why_not_built(source, *_FLAGS) is not None or hasattr(
        library(source, *_FLAGS), f"{source.stem}_products"
    )


def fused_word_sums(
    pair: tuple[Tensor, Tensor],
    weight: Tensor,
    readout: Readout,
    *,
    factors: Factors,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `lens_native.fused_sums` does, with these factors: float32 [n, H] and [V, H].

    Hand in `PAIRS` rows at a time.
    """
    pieces = map(readout.finish_differences, products(pair, weight, factors))
    return add_up(pieces, len(pair[0]), len(weight))


def products(pair: tuple[Tensor, Tensor], weight: Tensor, factors: Factors) -> Iterator[Tensor]:
    """Yield the first model's products and below them the differences', float32 [2n, columns].

    `COLUMNS` ids at a time, the last ones fewer. Each is valid until the next one.
    """
    h, other = (x.contiguous() for x in pair)
    n, width = h.shape
    threads = torch.get_num_threads()
    # As `Size` in the kernel: a width is made of whole blocks, rows of whole tiles.
    words = -(-width // BLOCK) * WORDS[factors].block
    padded = -(-2 * n // _ROWS) * _ROWS
    rows = workspace.take("lens words", padded, words, h.device)
    scratch = workspace.take("lens panels", threads, (words + padded) * _PANEL, h.device)
    pack, multiply = _functions(factors)
    size = np.array([n, 0, width, 0, 0, threads], np.int64)
    pack(h.data_ptr(), other.data_ptr(), size.ctypes.data, rows.data_ptr())
    for piece in torch.split(weight, COLUMNS * threads):
        part = piece if piece.stride(1) == 1 else piece.contiguous()
        out = workspace.take("lens products", 2 * n, len(part), h.device)
        size[[1, 3, 4]] = len(part), part.stride(0), out.stride(0)
        size_at, out_at = size.ctypes.data, out.data_ptr()
        multiply(rows.data_ptr(), part.data_ptr(), size_at, out_at, scratch.data_ptr())
        # Added up in equal pieces whatever the number of threads: the same bits.
        yield from torch.split(out, COLUMNS, dim=1)


def _source(factors: Factors) -> Path:
    return Path(__file__).with_name(f"lens_{factors}.cpp")


@functools.cache
def _functions(factors: Factors) -> tuple[Any, Any]:
    source = _source(factors)
    found = library(source, *_FLAGS)
    pack, multiply = (getattr(found, f"{source.stem}_{name}") for name in ("rows", "products"))
    pack.argtypes, pack.restype = [ctypes.c_void_p] * 4, None
    multiply.argtypes, multiply.restype = [ctypes.c_void_p] * 5, None
    return pack, multiply
