"""Memory for the values of a layer, taken once and used for layer after layer.

A layer's tensors lie one after another in one block. The allocator would give and take back dozens
of pieces per layer from two threads, keep what doesn't fit together, and hand out pages that have
to be cleared first, which costs as much as the copy into them. All streams of a process share the
blocks, since only one model runs at a time; they go when the last stream does.
"""

import threading
import weakref
from typing import ClassVar

import torch
from torch import Tensor

ALIGNMENT = 64


class Slab:
    """One block. What is given out is valid until `reset`."""

    def __init__(self, size: int) -> None:
        self._block = torch.empty(size, dtype=torch.uint8)
        self._used = 0

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self._block)

    def take(self, size: int, shift: int = 0) -> Tensor:
        """Return `size` bytes, uint8, that begin `shift` behind a multiple of 64.

        What no longer fits (a conversion made more than it read) gets memory of its own.
        """
        start = -(-self._used // ALIGNMENT) * ALIGNMENT + shift
        if start + size > self.size:
            return torch.empty(shift + size, dtype=torch.uint8)[shift:]
        self._used = start + size
        return self._block[start : start + size]

    def reset(self) -> None:
        """Give out everything again."""
        self._used = 0


class Pool:
    """Slabs that are free."""

    _current: ClassVar[weakref.ref["Pool"] | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._free: list[Slab] = []
        self._lock = threading.Lock()

    @classmethod
    def shared(cls) -> "Pool":
        """Return the process's pool; it lives as long as somebody holds it."""
        with cls._making:
            pool = None if cls._current is None else cls._current()
            if pool is None:
                pool = cls()
                cls._current = weakref.ref(pool)
            return pool

    def take(self, size: int) -> Slab:
        """Return a slab of at least `size` bytes; too small ones are let go."""
        with self._lock:
            fitting = [slab for slab in self._free if slab.size >= size]
            if not fitting:
                self._free.clear()
                return Slab(size)
            self._free.remove(fitting[0])
            return fitting[0]

    def give(self, slab: Slab) -> None:
        """Take a slab back whose tensors nobody uses any more."""
        slab.reset()
        with self._lock:
            self._free.append(slab)
