"""A cache that is bounded by bytes: matrices differ in size by a factor of ten thousand.

Streamlit's own caches are bounded by number: 16 matrices of a prompt with 30,000 tokens are 2 GB.
"""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakValueDictionary

Clock = Callable[[], float]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Kept:
    value: Any
    num_bytes: int
    until: float


class Pool:
    """Values of several functions, for a time; what was used longest ago is forgotten first.

    What is larger than the whole pool is returned and not kept. Safe to use from several threads:
    of those that ask for the same value at once one reads it, the others wait.
    """

    def __init__(self, max_bytes: int, ttl_s: float, now: Clock = time.monotonic) -> None:
        self._max_bytes, self._ttl_s, self._now = max_bytes, ttl_s, now
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._reading: WeakValueDictionary[Hashable, threading.Lock] = WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        """Size of all that is kept."""
        with self._lock:
            return sum(kept.num_bytes for kept in self._kept.values())

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()

    def get(self, key: Hashable, read: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return what is kept under a key, else what `read` returns."""
        with self._own(key):
            found = self._find(key)
            if found is not None:
                value: T = found.value
                return value
            value = read()
            self._keep(key, _Kept(value, size(value), self._now() + self._ttl_s))
            return value

    def _own(self, key: Hashable) -> threading.Lock:
        with self._lock:
            own = self._reading.get(key)
            if own is None:
                own = self._reading[key] = threading.Lock()
            return own

    def _find(self, key: Hashable) -> _Kept | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None or found.until < self._now():
                return None
            self._kept.move_to_end(key)
            return found

    def _keep(self, key: Hashable, kept: _Kept) -> None:
        with self._lock:
            self._kept.pop(key, None)
            now = self._now()
            for old in [k for k, each in self._kept.items() if each.until < now]:
                del self._kept[old]
            if kept.num_bytes > self._max_bytes:
                return
            self._kept[key] = kept
            total = sum(each.num_bytes for each in self._kept.values())
            while total > self._max_bytes:
                total -= self._kept.popitem(last=False)[1].num_bytes


class _Pooled(Generic[P, T]):
    """A function whose results are in a pool. `clear` empties the pool."""

    def __init__(
        self, read: Callable[P, T], pool: Callable[[], Pool], size: Callable[[T], int]
    ) -> None:
        functools.update_wrapper(self, read)
        self._read, self._pool, self._size = read, pool, size

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (self.__module__, self._read.__qualname__, args, tuple(sorted(kwargs.items())))
        return self._pool().get(key, lambda: self._read(*args, **kwargs), self._size)

    def clear(self) -> None:
        """Forget what this and the other functions of the pool returned."""
        self._pool().clear()


def pooled(
    pool: Callable[[], Pool], size: Callable[[T], int]
) -> Callable[[Callable[P, T]], _Pooled[P, T]]:
    """Keep a function's results in the pool that `pool` returns; its arguments are their key."""
    return lambda read: _Pooled(read, pool, size)
