"""Errors of other libraries in one line."""

import pytest

from quantwatch.errors import ResourceError
from quantwatch.models.quiet import explained, one_line


def test_lack_of_memory_or_disk_is_the_monitors_trouble() -> None:
    """Catches a full disk that is reported as the user's wrong model (exit 2 instead of 3)."""
    full = OSError(28, "No space left on device")
    assert full.errno == 28
    limit = OSError(27, "File too large")
    threads = RuntimeError("can't start new thread")
    memory = RuntimeError("x: can't allocate memory: you tried")
    for error in (full, limit, MemoryError(), memory, threads):
        with pytest.raises(ResourceError, match=r"^thing: "), explained("thing"):
            raise error


def test_one_line_is_short_and_never_empty() -> None:
    """Catches a message of 200 lines, or none at all."""
    assert one_line(ValueError("\n\n  first   line\nsecond")) == "first line"
    assert one_line(ValueError("Problem:\n  here\nand there")) == "Problem: here"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line(ValueError("x" * 5000))) == 301
