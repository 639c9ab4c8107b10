"""stdout and stderr: results and words. A stream that can't be written to never hides a verdict."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from quantwatch.errors import ResourceError

_GONE = (errno.EPIPE, errno.EBADF)
"""What a reader that went away looks like: nobody is left to tell."""


def say(text: str) -> None:
    """Write to stdout, which carries results only. A reader that went away is no error.

    Raises ResourceError when the result can't be written: a full disk must not look like success.
    """
    try:
        _write(sys.stdout, text)
    except OSError as error:
        if error.errno not in _GONE:
            raise ResourceError(f"can't write to stdout: {error.strerror}") from error


def whisper(text: str) -> None:
    """Write one line to stderr: notes, progress, errors. Where nobody reads, it is dropped."""
    try:
        _write(sys.stderr, f"{text}\n")
    except OSError as error:
        # Words about a run never decide its exit code; the stream is silenced by now.
        _ = error


@contextmanager
def steady() -> Iterator[None]:
    """Let the body end with its own exit code, whatever the state of stdout and stderr.

    Python has no stream where the shell closed one, and exits with 1 or 120 when the last flush of
    one fails: 1 would read as a regression.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream or _nowhere() for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            _settle(stream)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(_encodable(stream, text))
        stream.flush()
    except OSError:
        _silence(stream)
        raise


def _encodable(stream: TextIO, text: str) -> str:
    """Replace what the stream's encoding has no letters for (a C locale, half a surrogate pair)."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def _settle(stream: Any) -> None:
    try:
        stream.flush()
    except OSError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Point a stream nowhere, so that nothing that is left in it can fail later."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
