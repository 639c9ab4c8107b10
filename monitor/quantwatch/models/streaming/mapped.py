"""Safetensors files mapped read-only, their tensors copied out one by one.

The mapping is shared and read-only, so that it counts as page cache, not as the process's data, and
reference and candidate of one file share it. (What `safetensors` maps for torch is private and
writable: under a limit of the data segment it can't even be opened.) A tensor is copied before it
is used: quantizing writes into it, and a file that somebody cuts short can't hurt it afterwards.
Before and after each copy the file is compared with what it was when it was opened.

Given up: a file cut in the microseconds between check and copy ends the process with SIGBUS.
"""

import json
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from quantwatch.errors import ModelError
from quantwatch.models.streaming.slabs import ALIGNMENT

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES = 8

Room = Callable[[int, int], Tensor]
"""(bytes, distance from a multiple of 64) → memory, uint8."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    size: int

    @property
    def shift(self) -> int:
        """How far from a multiple of 64 bytes it is in the file.

        A resident model computes in the file's mapping, and some products round by alignment.
        """
        shift = self.start % ALIGNMENT
        return 0 if shift % _DTYPES[self.dtype].itemsize else shift


class MappedFile:
    """One open safetensors file. Raises ModelError naming it when it is truncated or garbled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A bare descriptor: a file object that lives as long as a model would have to be closed.
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._identity = _identity(self._descriptor)
        with path.open("rb") as file:
            self._entries = _read_header(file, path, self._identity[0])
        self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)

    def lazy(self) -> dict[str, "LazyTensor"]:
        """Return all tensors by name; nothing is read yet."""
        return {name: LazyTensor(self, name, entry) for name, entry in self._entries.items()}

    def read(self, entry: Entry, room: Room) -> Tensor:
        """Return a copy of a tensor; raises ModelError when the file isn't what it was."""
        self._check()
        flat = room(entry.size, entry.shift)
        if entry.size:
            # numpy gives up the interpreter's lock while it copies, and takes read-only memory.
            raw = np.frombuffer(self._map, np.uint8, entry.size, entry.start)
            np.copyto(flat.numpy(), raw)
            del raw
            self._release(entry)
            self._check()
        return flat.view(_DTYPES[entry.dtype]).view(entry.shape)

    def _check(self) -> None:
        """Raise ModelError when the file was written to since it was opened."""
        if (now := _identity(self._descriptor)) != self._identity:
            before = self._identity[0]
            what = f"{before} bytes before, {now[0]} now" if now[0] != before else "written to"
            raise ModelError(f"{self.path} changed while it was streamed ({what}): run it again")

    def _release(self, entry: Entry) -> None:
        """Give back the pages of a tensor; they stay in the system's cache."""
        first = entry.start - entry.start % mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, entry.start + entry.size - first)


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read when it is indexed with `...`, as transformers does."""

    file: MappedFile
    name: str
    entry: Entry

    def __getitem__(self, _: Any) -> Tensor:
        return self.file.read(self.entry, fresh)

    def read(self, room: Room, dtype: torch.dtype | None) -> Tensor:
        """Return a copy in `room`, in another dtype if one is given."""
        if dtype in (None, _DTYPES[self.entry.dtype]):
            return self.file.read(self.entry, room)
        assert dtype is not None
        flat = room(prod(self.entry.shape) * dtype.itemsize, 0)
        return flat.view(dtype).view(self.entry.shape).copy_(self[...])

    def bytes_as(self, dtype: torch.dtype | None) -> int:
        """Return the bytes it takes in a dtype, None for its own."""
        return prod(self.entry.shape) * (dtype or _DTYPES[self.entry.dtype]).itemsize

    def get_dtype(self) -> str:
        """Return the stored dtype as safetensors names it."""
        return self.entry.dtype

    def get_shape(self) -> list[int]:
        """Return the stored shape."""
        return list(self.entry.shape)

    @property
    def without_values(self) -> "MetaTensor":
        """The same tensor as shape and dtype alone."""
        return MetaTensor(self.entry.dtype, self.entry.shape)


@dataclass(frozen=True, slots=True)
class MetaTensor:
    """Stands for a `LazyTensor` where only shape and dtype matter."""

    dtype: str
    shape: tuple[int, ...]

    def __getitem__(self, _: Any) -> Tensor:
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device="meta")

    def get_dtype(self) -> str:
        """Return the stored dtype as safetensors names it."""
        return self.dtype


def fresh(size: int, shift: int = 0) -> Tensor:
    """Return memory of its own: `size` bytes, uint8, `shift` behind a multiple of 64."""
    return torch.empty(shift + size, dtype=torch.uint8)[shift:]


def _identity(descriptor: int) -> tuple[int, int]:
    stat = os.fstat(descriptor)
    return stat.st_size, stat.st_mtime_ns


def _read_header(file: BinaryIO, path: Path, total: int) -> dict[str, Entry]:
    """Return where the tensors are: 8 bytes of length, JSON, then the values one after another."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    start = _LENGTH_BYTES + length
    if total < _LENGTH_BYTES or start > total:
        raise ModelError(f"{path} is truncated or corrupt: its header doesn't fit {total} bytes")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, values, start) for name, values in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is truncated or corrupt: its header is garbled") from error
    end = max((entry.start + entry.size for entry in entries.values()), default=start)
    if end != total:
        raise ModelError(f"{path} is truncated or corrupt: {end} bytes expected, {total} found")
    return entries


def _entry(path: Path, name: str, values: dict[str, Any], start: int) -> Entry:
    dtype, (first, last) = values["dtype"], values["data_offsets"]
    if dtype not in _DTYPES:
        raise ModelError(
            f"{path}: {name} is stored as {dtype}, which can't be streamed; allowed: "
            f"{', '.join(_DTYPES)}"
        )
    shape = tuple(values["shape"])
    if last - first != prod(shape) * _DTYPES[dtype].itemsize:
        raise ModelError(f"{path} is truncated or corrupt: {name} has {last - first} bytes")
    return Entry(dtype, shape, start + first, last - first)
