"""An append-only file of arrays, where per-token vectors wait.

Exact quantiles need every token's value once, at the end; a thousand prompts of them would not fit
the memory promise (design §5). The file has no name on POSIX: nothing is left behind after a crash.
"""

import os
import tempfile
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Strip:
    """Where one array [S, P, …] lies in the spool, in parts that continue one another along P.

    A prompt of 32,768 tokens comes in hundreds of parts, of every metric: each is two numbers in
    an array here, not an object.
    """

    num_rows: int
    rest: tuple[int, ...]
    """The sizes behind P."""
    dtype: np.dtype[Any]
    num_columns: int = 0
    """P, over all parts."""
    parts: "array[int]" = field(default_factory=lambda: array("q"))
    """Offset in the file and number of columns of each part, in turn."""


class Spool:
    """Arrays on disk, written once and read row by row."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed in __exit__)
        self._end = 0

    def append(self, values: NDArray[Any], strip: Strip | None = None) -> Strip:
        """Write an array [S, P, …], behind the parts of a strip if one is given; return the strip.

        Raises OSError when the disk is full, ValueError for a part of another shape or dtype.
        """
        rows, columns, *rest = values.shape
        strip = strip or Strip(rows, tuple(rest), values.dtype)
        if (rows, tuple(rest), values.dtype) != (strip.num_rows, strip.rest, strip.dtype):
            wanted = ", ".join(map(str, (strip.num_rows, "P", *strip.rest)))
            raise ValueError(
                f"a part {list(values.shape)} {values.dtype} of an array [{wanted}] {strip.dtype}"
            )
        self._file.write(np.ascontiguousarray(values).tobytes())
        strip.parts.extend((self._end, columns))
        strip.num_columns += columns
        self._end += values.nbytes
        return strip

    def read(self, strip: Strip, first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Return rows first…last−1 of an array, its parts joined."""
        self._file.flush()
        stop = strip.num_rows if last is None else last
        found = np.empty((stop - first, strip.num_columns, *strip.rest), strip.dtype)
        column_bytes = strip.dtype.itemsize * int(np.prod(strip.rest, dtype=np.int64))
        start = 0
        for offset, columns in zip(strip.parts[::2], strip.parts[1::2], strict=True):
            row = column_bytes * columns
            data = os.pread(self._file.fileno(), row * (stop - first), offset + row * first)
            part = np.frombuffer(data, strip.dtype).reshape(stop - first, columns, *strip.rest)
            found[:, start : start + columns] = part
            start += columns
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
