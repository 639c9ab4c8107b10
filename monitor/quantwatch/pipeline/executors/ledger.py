"""Which worker measures which unit: handed out, taken back, accepted once. Pure.

A unit that a worker takes to its grave is handed out again, before any other; after a few workers
have died over it nobody else is sent there. What is accepted leaves in order. How far ahead of the
oldest open unit anybody works is bounded, so that what waits for its turn fits in memory.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from quantwatch.errors import WorkersLostError

P = TypeVar("P")
ATTEMPTS = 3
"""So many workers may end over one unit."""


@dataclass
class Ledger(Generic[P]):
    """The units 0 … `num_units` − 1 of one night."""

    num_units: int
    window: int
    """How many units from the oldest open one on may be handed out."""
    attempts: int = ATTEMPTS
    num_retried: int = 0
    _waiting: list[int] = field(init=False)
    _held: dict[int, int] = field(default_factory=dict)
    _kept: dict[int, P] = field(default_factory=dict)
    _ends: dict[int, list[str]] = field(default_factory=dict)
    _next: int = 0

    def __post_init__(self) -> None:
        """All units wait."""
        self._waiting = list(range(self.num_units))

    @property
    def is_complete(self) -> bool:
        """Whether every unit was accepted and has left."""
        return self._next == self.num_units

    @property
    def num_waiting(self) -> int:
        """Number of units that nobody is at and nobody measured yet."""
        return len(self._waiting)

    @property
    def has_open_losses(self) -> bool:
        """Whether a unit that a worker took to its grave isn't measured yet."""
        return any(unit >= self._next and unit not in self._kept for unit in self._ends)

    def held_by(self, worker: int) -> int | None:
        """Return the unit that a worker is at."""
        return self._held.get(worker)

    def take(self, worker: int) -> int | None:
        """Hand out the lowest unit that waits; None when there is none for now.

        Raises ValueError for a worker that is at one.
        """
        if worker in self._held:
            raise ValueError(f"worker {worker} is at unit {self._held[worker]}")
        if not self._waiting or self._waiting[0] >= self._next + self.window:
            return None
        self._held[worker] = heapq.heappop(self._waiting)
        return self._held[worker]

    def accept(self, worker: int, unit: int, partial: P) -> bool:
        """Take what a worker measured; False, and nothing happens, if it isn't its unit any more.

        That is so when it was thought dead, and the unit was handed to another one.
        """
        if self._held.get(worker) != unit:
            return False
        del self._held[worker]
        self._kept[unit] = partial
        return True

    def lose(self, worker: int, why: str) -> int | None:
        """Note that a worker is gone; return the unit that waits again, None if it was at none.

        Raises WorkersLostError when too many have ended over that unit.
        """
        unit = self._held.pop(worker, None)
        if unit is None:
            return None
        ends = self._ends.setdefault(unit, [])
        ends.append(why)
        if len(ends) >= self.attempts:
            raise WorkersLostError(f"{len(ends)} workers ended over it ({'; '.join(ends)})", unit)
        self.num_retried += 1
        heapq.heappush(self._waiting, unit)
        return unit

    def ready(self) -> Iterator[P]:
        """Yield what is complete up to here, each once, in order."""
        while self._next in self._kept:
            self._next += 1
            yield self._kept.pop(self._next - 1)
