"""Values between a run and the workers that it started: over a pipe, a length and a pickle.

Nowhere else is anything unpickled. Only values of this program can come of it, plain data, arrays
and exceptions: a pickle that names anything else, a function above all, is refused.
"""

import io
import pickle
from typing import IO, Any

_LENGTH = 8
_MOST = 1 << 40
_OWN = ("quantwatch", "quantwatch_kernels")
_PLAIN = {
    ("collections", "Counter"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
"""Beside numbers, words, tuples, lists, sets and tables, which no pickle has to name."""


def packed(value: object) -> bytes:
    """Return a value as bytes."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    """Return the value again.

    Raises ValueError when it would take more than our own types, or can't be read: it came half, or
    of another release that was installed meanwhile.
    """
    try:
        return _OwnValues(io.BytesIO(data)).load()
    except (ValueError, MemoryError):
        raise
    # Whatever an opcode, a constructor or a module that is no longer there raises: a thread that
    # ended by it would leave the run waiting.
    except Exception as error:
        raise ValueError(
            f"{len(data)} bytes are no value that can be read: {type(error).__name__}: {error}"
        ) from error


def send(pipe: IO[bytes], value: object) -> None:
    """Write a value and flush. Raises OSError when nobody reads any more."""
    data = packed(value)
    pipe.write(len(data).to_bytes(_LENGTH, "big") + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """Return the next value.

    Raises EOFError when the other side is gone, even half-way, and ValueError as `unpacked` does.
    """
    return unpacked(_read(pipe, int.from_bytes(_read(pipe, _LENGTH), "big")))


def _read(pipe: IO[bytes], count: int) -> bytes:
    if count > _MOST:
        raise ValueError(f"a value of {count} bytes is announced, which can't be")
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError(f"{len(data)} of {count} bytes came")
    return data


class _OwnValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, if it may."""
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        # A name with dots walks from our modules to those that they import.
        if "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (_is_own(found) or issubclass(found, BaseException)):
                return found
        raise ValueError(f"{module}.{name} is no value that a run and its workers send")


def _is_own(found: type) -> bool:
    return found.__module__.partition(".")[0] in _OWN
