"""The lens in one pass (`lens.cpp`): torch's products go piece by piece into running sums.

Rows of both models are multiplied together, `PAIRS` of them with `COLUMNS` ids at a time: a
megabyte that stays in the cache, whatever the vocabulary and the number of tokens. n rows, H hidden
width, V ids.
"""

import ctypes
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantwatch_kernels.compare.readout import Readout
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.native import library, why_not_built

__all__ = ["COLUMNS", "PAIRS", "add_up", "fused_sums", "why_not_native"]

_SOURCE = Path(__file__).with_name("lens.cpp")
_FLAGS = ("-ffp-contract=fast", "-fno-trapping-math")
PAIRS = 128
"""Rows per call: more gain nothing, fewer read the head's weights too often."""
COLUMNS = 1024
"""Ids per piece."""
_TOP = 5
_CLOSED_BOUND = 40.0
"""Differences from the centre beyond which e^x leaves float32's comfort.

What an id below e^-87 of the likeliest, which is left out, could add is then below 1e-20.
"""

_State = np.dtype(
    [
        *((name, "f8") for name in ("maximum", "sum", "drift", "excess")),
        *((name, "f8") for name in ("centre", "largest", "spoiled")),
        ("top", "f8", _TOP),
        ("gap", "f8", _TOP),
    ]
)


@functools.cache
def why_not_native() -> str | None:
    """Say why `lens.cpp` can't be used in this process, None when it can."""
    return why_not_built(_SOURCE, *_FLAGS)


def fused_sums(
    pair: tuple[Tensor, Tensor], weight: Tensor, readout: Readout
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare normed hidden states [n, H] of both models through a head's weight [V, H] on the CPU.

    A float32 head multiplies the differences of the states (`lens_words.h` says why), one of 16
    bits both models' states, whose products it rounds as it does in the models. Memory grows with
    n: hand in `PAIRS` rows at a time. Returns KL (NaN for rows that need the whole row in float64),
    and the mean |Δ| over the reference's five and three largest logits; float64 [n].
    """
    return add_up(_pieces(pair, weight, readout), len(pair[0]), len(weight))


def _pieces(pair: tuple[Tensor, Tensor], weight: Tensor, readout: Readout) -> Iterator[Tensor]:
    h, other = pair
    if weight.dtype == torch.float32:
        for products in _products(torch.cat([h, other - h]), weight):
            yield readout.finish_differences(products)
        return
    for products in _products(torch.cat([h, other]), weight):
        logits = readout.finish(products)
        logits[len(h) :] -= logits[: len(h)]
        yield logits


def add_up(pieces: Iterable[Tensor], rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compare logits and another model's differences from them, `width` ids in all.

    Both come as float32 [2 · rows, columns], piece by piece.

    Returns as `fused_sums` does, whatever the number of threads.
    """
    state = np.zeros(rows, _State)
    state["maximum"] = state["top"] = -np.inf
    take, threads = _take(), torch.get_num_threads()
    for z in pieces:
        take(
            *(z.data_ptr(), z[rows:].data_ptr(), rows, z.shape[1], z.stride(0)),
            *(state.ctypes.data, threads),
        )
    return _finish(state, width)


def _products(rows: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """Yield rows' products, float32 [2n, columns] of `COLUMNS` ids, the last ones fewer."""
    for part in torch.split(weight, COLUMNS):
        out = workspace.take("lens products", len(rows), len(part), rows.device)
        if part.dtype == torch.float32:
            yield torch.mm(rows, part.t(), out=out)
        else:
            yield out.copy_(torch.mm(rows, part.t()))


def _finish(state: NDArray[Any], width: int) -> tuple[Tensor, Tensor, Tensor]:
    with np.errstate(invalid="ignore"):
        drift = state["drift"] / state["sum"]
        kl = np.log1p((state["excess"] - state["drift"]) / state["sum"]) + drift
        kl[(state["spoiled"] != 0) | ~(state["largest"] <= _CLOSED_BOUND)] = np.nan
        gaps = state["gap"][:, : min(width, _TOP)]
    found = (kl, gaps.mean(-1), gaps[:, :3].mean(-1))
    return tuple(torch.from_numpy(np.ascontiguousarray(x)) for x in found)  # type: ignore[return-value]


@functools.cache
def _take() -> Any:
    take = library(_SOURCE, *_FLAGS).lens_take
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    take.argtypes, take.restype = [pointer, pointer, size, size, size, pointer, size], None
    return take
