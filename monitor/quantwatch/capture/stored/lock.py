"""One lock per entry, of the operating system: let go when its process ends, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Mode = Literal["exclusive", "shared", "busy"]


class Lock:
    """A held lock; `mode` says how: to write, to read, or not at all since another one writes."""

    def __init__(self, handle: int, mode: Mode) -> None:
        self.mode = mode
        self._handle = handle

    def share(self) -> None:
        """Let others read, too. Somebody who was quicker may have it to write: `busy` then."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.mode = "busy"
        else:
            self.mode = "shared"


@contextmanager
def locked(path: Path) -> Iterator[Lock]:
    """Lock a file as well as it can be had at once; nobody is waited for. Raises OSError."""
    # The file stays: whoever removed it would let two processes lock two files of one name.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield Lock(handle, _take(handle))
    finally:
        os.close(handle)


def _take(handle: int) -> Mode:
    modes: tuple[tuple[Mode, int], ...] = (
        ("exclusive", fcntl.LOCK_EX),
        ("shared", fcntl.LOCK_SH),
    )
    for mode, kind in modes:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return mode
    return "busy"
