"""Values between two processes of this program, over a pipe: a length, then a pickle."""

import pickle
from typing import IO, Any

_LENGTH = 8


def send(pipe: IO[bytes], value: Any) -> None:
    """Write a value and flush. Raises OSError when nobody reads any more."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(len(data).to_bytes(_LENGTH, "big") + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """Return the next value. Raises EOFError when the other side is gone, even half-way."""
    return pickle.loads(_read(pipe, int.from_bytes(_read(pipe, _LENGTH), "big")))


def _read(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError(f"{len(data)} of {count} bytes came")
    return data
