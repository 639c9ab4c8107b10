"""Read a file once, from its beginning to its end, and know at the end whether it is the one."""

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Self

from quantwatch.capture.stored.damage import DamagedError

_DRAIN_BYTES = 1 << 20


class CheckedFile:
    """A file of `size` bytes with a SHA-256. What was taken counts only after `finish`.

    The bytes that are hashed are those that are used: nobody can change a file in between.
    """

    def __init__(self, path: Path, sha: str, size: int) -> None:
        self.left = size
        self._sha, self._size = sha, size
        self._digest = hashlib.sha256()
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DamagedError(str(error.strerror)) from error

    def take(self, room: memoryview) -> None:
        """Fill memory with the next bytes. Raises DamagedError where the file ends before."""
        got = 0
        try:
            while got < len(room) and (count := self._file.readinto(room[got:])):
                got += count
        except OSError as error:
            raise DamagedError(str(error.strerror)) from error
        self._digest.update(room[:got])
        self.left -= got
        if got < len(room):
            raise DamagedError(f"it has {self._size - self.left} bytes, {self._size} were written")

    def finish(self) -> None:
        """Read what is left. Raises DamagedError unless the whole file is what was written."""
        while self.left > 0:
            self.take(memoryview(bytearray(min(self.left, _DRAIN_BYTES))))
        if self._file.read(1):
            raise DamagedError(f"it has more than the {self._size} bytes that were written")
        if self._digest.hexdigest() != self._sha:
            raise DamagedError("it is not what was written: its checksum differs")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
