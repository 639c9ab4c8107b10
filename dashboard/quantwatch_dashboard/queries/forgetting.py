"""Forgetting what was read, after something was written: the page shows it at once."""

import sys
import threading
from collections import deque
from collections.abc import Iterator
from inspect import isclass
from typing import Any

from quantwatch_dashboard.queries import check, overview, runs

_PACKAGE = "quantwatch_dashboard.queries."
_KEPT = f"{_PACKAGE}connection"
"""Engines stay open: what they read is not cached in them."""

_LOCK = threading.Lock()
_MOST_KNOWN = 1_000
_KNOWN: deque[tuple[str, bool]] = deque(maxlen=_MOST_KNOWN)
"""Runs that began (True) or ended, as some page has seen it."""


def forget_standings(before: frozenset[str], now: frozenset[str]) -> None:
    """Forget how checks stand, and their newest runs: these were under way before and are now.

    Once for each run that begins or ends, however many pages see it: else nothing is ever warm.
    Prompts, grids and whole runs don't change and are kept.
    """
    happened = {*((run, True) for run in now - before), *((run, False) for run in before - now)}
    with _LOCK:
        fresh = happened - set(_KNOWN)
        _KNOWN.extend(fresh)
    if not fresh:
        return
    for standing in (overview.checks, overview.with_history, runs.recent_runs):
        standing.clear()
    for own in (check.summary, check.trend, check.marks, check.changed):
        own.clear()


def forget() -> None:
    """Empty the cache of every query, in all sessions of this process."""
    for cached in _cached():
        cached.clear()


def _cached() -> Iterator[Any]:
    modules = [m for name, m in sys.modules.items() if name.startswith(_PACKAGE) and name != _KEPT]
    seen: set[int] = set()
    for module in modules:
        for value in vars(module).values():
            own = getattr(value, "__module__", "") == module.__name__ and not isclass(value)
            if own and hasattr(value, "clear") and callable(value) and id(value) not in seen:
                seen.add(id(value))
                yield value
