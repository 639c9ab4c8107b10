"""Tensors surrounded by poison, and outputs that notice a write beyond their end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["DTYPES", "device", "guarded_outputs", "surrounded"]

_GUARD = 97
_SENTINEL = 85


def device() -> str:
    """Return where the kernels run: compiled on a GPU if there is one, else interpreted."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# The interpreter neither multiplies nor rounds bfloat16 (bug log 41): a GPU does.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def surrounded(x: Tensor) -> Tensor:
    """Return the matrix inside a larger one of NaN (integers: their largest value)."""
    poison = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    buffer = torch.full((x.shape[0] + 70, x.shape[1] + 133), poison, dtype=x.dtype, device=x.device)
    inner = buffer[: x.shape[0], : x.shape[1]]
    inner.copy_(x)
    return inner


@contextmanager
def guarded_outputs() -> Iterator[None]:
    """Let `torch.empty` return the start of a longer buffer, and look at the rest afterwards."""
    buffers: list[tuple[Tensor, int]] = []

    def empty(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + _GUARD,), _SENTINEL, dtype=dtype, device=device)
        buffers.append((buffer, count))
        return buffer[:count].view(*shape)

    with mock.patch.object(torch, "empty", empty):
        yield
    assert buffers, "nothing was allocated with torch.empty"
    for buffer, count in buffers:
        assert bool((buffer[count:] == _SENTINEL).all()), "a kernel wrote beyond its output"
