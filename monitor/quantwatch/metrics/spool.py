"""An append-only file of arrays, where per-token vectors wait.

Exact quantiles need every token's value once, at the end; a thousand prompts of them would not fit
the memory promise (design §5). The file has no name on POSIX: nothing is left behind after a crash.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one array [S, P] lies in the spool."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class Spool:
    """Arrays on disk, written once and read row by row."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed in __exit__)
        self._end = 0

    def append(self, array: NDArray[Any]) -> Slot:
        """Write an array and return where it lies. Raises OSError when the disk is full."""
        data = np.ascontiguousarray(array)
        slot = Slot(self._end, data.shape, data.dtype.str)
        self._file.write(data.tobytes())
        self._end += data.nbytes
        return slot

    def read(self, slot: Slot, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Return rows first…last−1 of an array's leading axis."""
        self._file.flush()
        stop = slot.shape[0] if last is None else last
        dtype = np.dtype(slot.dtype)
        row = dtype.itemsize * int(np.prod(slot.shape[1:], dtype=np.int64))
        data = os.pread(self._file.fileno(), row * (stop - first), slot.offset + row * first)
        return np.frombuffer(data, dtype).reshape(stop - first, *slot.shape[1:])

    def read_joined(
        self, slots: Sequence[Slot], first: int = 0, last: int | None = None, axis: int = -1
    ) -> NDArray[Any]:
        """Return rows first…last−1 of arrays that continue one another along an axis."""
        parts = [self.read(slot, first, last) for slot in slots]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
