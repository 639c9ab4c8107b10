"""Operators and their back ends: one name, several implementations, no silent fallback.

A back end registers with a *predicate* that says in words why it can't do a call. The back end that
was asked for (or the first one registered) runs if its predicate is silent; otherwise the next one
in order of registration does, and the fallback is counted under (op, wanted, used, reason).
`prefer` asks for a back end by name without passing it through every call. A call that a back end
does right but slower than the plain product it is there to replace is counted, too: `slow_calls`.
Both counts are the process's; what happens inside `watched` is counted for one owner as well.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, ParamSpec, TypeVar

__all__ = [
    "Fallback",
    "Op",
    "Slow",
    "Watch",
    "clear_fallbacks",
    "fallbacks",
    "prefer",
    "record_fallback",
    "record_slow",
    "slow_calls",
    "watched",
]

P = ParamSpec("P")
R = TypeVar("R")


class Fallback(NamedTuple):
    """A call, row or layer that another back end had to do."""

    op: str
    wanted: str
    used: str
    reason: str


class Slow(NamedTuple):
    """A call that unquantized arithmetic would have done faster."""

    op: str
    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class Watch:
    """What one owner's calls came to: `with watched(watch)` around each of them."""

    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    slow: Counter[Slow] = field(default_factory=Counter)


_counts: Counter[Fallback] = Counter()
_slow: Counter[Slow] = Counter()
_lock = threading.Lock()
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)
_preferred: ContextVar[str | None] = ContextVar("preferred back end", default=None)


def record_fallback(fallback: Fallback, count: int = 1) -> None:
    """Count a fallback (calls, rows or layers, as the reason says)."""
    watch = _watch.get()
    with _lock:
        _counts[fallback] += count
        if watch is not None:
            watch.fallbacks[fallback] += count


def fallbacks() -> dict[Fallback, int]:
    """Return every fallback since the last `clear_fallbacks`, with its count."""
    with _lock:
        return dict(_counts)


def record_slow(slow: Slow) -> None:
    """Count a call that is right but slower than without quantization."""
    watch = _watch.get()
    with _lock:
        _slow[slow] += 1
        if watch is not None:
            watch.slow[slow] += 1


def slow_calls() -> dict[Slow, int]:
    """Return every slow call since the last `clear_fallbacks`, with its count."""
    with _lock:
        return dict(_slow)


def clear_fallbacks() -> None:
    """Forget all counted fallbacks and slow calls."""
    with _lock:
        _counts.clear()
        _slow.clear()


@contextmanager
def watched(watch: Watch | None) -> Iterator[None]:
    """Inside, in this thread, events count for `watch` instead of for an outer one; None: nobody's.

    Threads that are started inside have no watch.
    """
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@contextmanager
def prefer(backend: str) -> Iterator[None]:
    """Inside, operators that have this back end use it unless a call names another one."""
    token = _preferred.set(backend)
    try:
        yield
    finally:
        _preferred.reset(token)


@dataclass(frozen=True, slots=True)
class _Backend(Generic[P, R]):
    run: Callable[P, R]
    why_not: Callable[P, str | None] | None


class Op(Generic[P, R]):
    """One operator. Back ends are tried in the order of registration; the last always applies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._backends: dict[str, _Backend[P, R]] = {}

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the back ends, the default first."""
        return tuple(self._backends)

    def register(
        self, backend: str, why_not: Callable[P, str | None] | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register the decorated function; `why_not` says why it can't do a call, or None."""
        if backend in self._backends:
            raise ValueError(f"{self.name} already has a back end named {backend!r}.")

        def add(run: Callable[P, R]) -> Callable[P, R]:
            self._backends[backend] = _Backend(run, why_not)
            return run

        return add

    def run(self, backend: str | None, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on `backend` (None: the preferred or first one), or on the next that applies.

        Raises ValueError for an unknown back end, or when none applies.
        """
        wanted = self.preferred(self.backends[0]) if backend is None else backend
        if wanted not in self._backends:
            raise ValueError(
                f"{self.name} has no back end {wanted!r}; it has {', '.join(self.backends)}."
            )
        reason = self.why_not(wanted, *args, **kwargs)
        if reason is None:
            return self._backends[wanted].run(*args, **kwargs)
        for used in self.backends:
            if used != wanted and self.why_not(used, *args, **kwargs) is None:
                record_fallback(Fallback(self.name, wanted, used, reason))
                return self._backends[used].run(*args, **kwargs)
        raise ValueError(f"{self.name}: no back end applies; {wanted}: {reason}.")

    def why_not(self, backend: str, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Say why a back end can't do a call, None when it can."""
        why_not = self._backends[backend].why_not
        return None if why_not is None else why_not(*args, **kwargs)

    def preferred(self, usual: str) -> str:
        """Return the back end that `prefer` asks for if this operator has it, else `usual`."""
        asked = _preferred.get()
        return usual if asked is None or asked not in self._backends else asked
