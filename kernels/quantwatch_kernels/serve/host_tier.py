"""Where swapped pages wait: a bounded file that is mapped into memory, or host tensors.

Both hold `num_slots` slots of `slot_bytes` bytes and return exactly what was written. The file is
allocated whole when the tier is made. A sparse file would let a full disk show up later, as SIGBUS
in the middle of a write through the mapping, which ends the process and every request in it;
allocated at once, a full disk is an error at a time when nothing depends on the tier. The file is
unlinked as soon as it is open: nobody can shorten it under the mapping, and nothing is left behind
by a crash.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["HostFile", "HostTensors", "HostTier", "SwapSpaceError"]

_ALIGNMENT = 64


class SwapSpaceError(RuntimeError):
    """The host tier has no room: the disk is full, or all slots are taken. Nothing has changed."""


class HostTier(Protocol):
    """Slots of bytes outside the accelerator's memory."""

    num_slots: int
    slot_bytes: int

    def view(self, slot: int) -> Tensor:
        """Return a slot as uint8 [slot_bytes], to be read and written in place."""

    def close(self) -> None:
        """Give the memory back; views are invalid afterwards."""


class HostTensors:
    """Slots in ordinary host memory, pinned if asked for, so that copies can run on their own."""

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool = False) -> None:
        _check(num_slots, slot_bytes)
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        stride = _aligned(slot_bytes)
        self._data = torch.zeros(num_slots, stride, dtype=torch.uint8, pin_memory=pinned)

    def view(self, slot: int) -> Tensor:
        """Return a slot as uint8 [slot_bytes]."""
        return self._data[_known(slot, self.num_slots), : self.slot_bytes]

    def close(self) -> None:
        """Give the memory back."""
        self._data = torch.zeros(0, 0, dtype=torch.uint8)


class HostFile:
    """Slots in an unlinked, fully allocated file under `folder`, mapped into memory.

    Raises SwapSpaceError when the disk has no room for all of them.
    """

    def __init__(
        self,
        folder: Path,
        num_slots: int,
        slot_bytes: int,
        *,
        allocate: Callable[[int, int, int], None] = os.posix_fallocate,
    ) -> None:
        _check(num_slots, slot_bytes)
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._stride = _aligned(slot_bytes)
        size = num_slots * self._stride
        with tempfile.TemporaryFile(dir=folder, prefix="quantwatch-swap-") as file:
            try:
                allocate(file.fileno(), 0, size)
            except OSError as error:
                raise SwapSpaceError(
                    f"{folder}: no room for a swap file of {size} bytes ({error.strerror})."
                ) from error
            # The tensor keeps the mapping, the mapping keeps the file.
            self._data = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)

    def view(self, slot: int) -> Tensor:
        """Return a slot as uint8 [slot_bytes]."""
        begin = _known(slot, self.num_slots) * self._stride
        return self._data[begin : begin + self.slot_bytes]

    def close(self) -> None:
        """Drop the mapping. The kernel frees the file when the last view is gone."""
        self._data = torch.zeros(0, dtype=torch.uint8)


def _check(num_slots: int, slot_bytes: int) -> None:
    if num_slots < 1 or slot_bytes < 1:
        raise ValueError(
            f"a host tier needs at least 1 slot of 1 byte; got {num_slots} of {slot_bytes}."
        )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _known(slot: int, num_slots: int) -> int:
    if not 0 <= slot < num_slots:
        raise ValueError(f"slot {slot} is none of 0 … {num_slots - 1}.")
    return slot
