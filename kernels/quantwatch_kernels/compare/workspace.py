"""Scratch memory of the fast back ends: small, reused, one set per thread.

A chunk of rows goes through thirty passes. Fresh memory for each would cost more than the
arithmetic (page faults), and a chunk that leaves the cache costs twice the time.
"""

import threading

import torch
from torch import Tensor

__all__ = ["Workspace", "rows_per_chunk", "workspace"]

_CHUNK_ELEMENTS = 1 << 19
"""Floats per buffer: five buffers then share 2.5 MB of cache (measured best of 2^15 … 2^20)."""


def rows_per_chunk(width: int) -> int:
    """Return how many rows of `width` floats are worked on at a time."""
    return max(1, _CHUNK_ELEMENTS // max(1, width))


class Workspace(threading.local):
    """Named buffers of the calling thread. Contents are undefined until written."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, rows: int, width: int, device: torch.device) -> Tensor:
        """Return a contiguous [rows, width] view of the buffer `name`, grown when too small."""
        size = rows * width
        buffer = self._buffers.get((name, device))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # an inference tensor could not be reused outside
                buffer = torch.empty(size, dtype=torch.float32, device=device)
            self._buffers[name, device] = buffer
        return buffer[:size].view(rows, width)

    def take_like(self, name: str, x: Tensor) -> Tensor:
        """Return a view of the buffer `name` with the shape and device of a matrix."""
        rows, width = x.shape
        return self.take(name, rows, width, x.device)

    def double(self, name: str, x: Tensor) -> Tensor:
        """Return a matrix as float64 in the buffer `name`."""
        rows, width = x.shape
        # Two float32 numbers make room for one float64; the storage is aligned for either.
        buffer = self.take(name, rows, 2 * width, x.device).view(torch.float64)
        return buffer.copy_(x)

    def clear(self) -> None:
        """Free the calling thread's buffers."""
        self._buffers.clear()


workspace = Workspace()
