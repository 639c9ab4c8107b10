"""Forgetting what was read, after something was written: the page shows it at once."""

import sys
from collections.abc import Iterator
from typing import Any

_PACKAGE = "quantwatch_dashboard.queries."
_KEPT = f"{_PACKAGE}connection"
"""Engines stay open: what they read is not cached in them."""


def forget() -> None:
    """Empty the cache of every query, in all sessions of this process."""
    for cached in _cached():
        cached.clear()


def _cached() -> Iterator[Any]:
    modules = [m for name, m in sys.modules.items() if name.startswith(_PACKAGE) and name != _KEPT]
    seen: set[int] = set()
    for module in modules:
        for value in vars(module).values():
            own = getattr(value, "__module__", "") == module.__name__
            if own and hasattr(value, "clear") and callable(value) and id(value) not in seen:
                seen.add(id(value))
                yield value
