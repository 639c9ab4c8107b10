"""The contents that could be given up now, in the order of a policy.

A heap of (rank, order of arrival, key) whose stale entries are skipped when they come up: a rank
that changes gets a new entry and the old one is recognised by its rank. So a use and a choice cost
O(log n), where a search over all idle blocks would cost O(n) for each page a request asks for.
"""

import heapq
from collections.abc import Hashable, Iterable
from itertools import count

from quantwatch_kernels.serve.eviction import EvictionPolicy, Rank

__all__ = ["Victims"]

_SLACK = 64


class Victims:
    """Candidates for eviction under one policy; the owner says who is a candidate."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._candidates: dict[Hashable, None] = {}  # a set that keeps its order
        self._heap: list[tuple[Rank, int, Hashable]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._candidates)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._candidates

    def add(self, key: Hashable) -> None:
        """Make a content a candidate."""
        self._candidates[key] = None
        self._push(key)

    def discard(self, key: Hashable) -> None:
        """Make it none: it is used again, or got a child."""
        self._candidates.pop(key, None)

    def advance(self, now: float) -> None:
        """Move on in time, before anything happens then."""
        self._replace(self.policy.advance(now))

    def reference(self, key: Hashable, now: float, source: Hashable = None) -> None:
        """Count a use and put everything whose rank it changed in its new place."""
        self._replace(self.policy.reference(key, now, source))

    def pop(self) -> Hashable:
        """Take the candidate with the lowest rank; of equal ones the one that came first.

        Raises ValueError when there is none.
        """
        while self._heap:
            rank, _, key = heapq.heappop(self._heap)
            if key in self._candidates and self.policy.rank(key) == rank:
                del self._candidates[key]
                return key
        raise ValueError("there is no candidate for eviction.")

    def _replace(self, changed: Iterable[Hashable]) -> None:
        for key in changed:
            if key in self._candidates:
                self._push(key)

    def _push(self, key: Hashable) -> None:
        heapq.heappush(self._heap, (self.policy.rank(key), next(self._arrivals), key))
        if len(self._heap) > 4 * len(self._candidates) + _SLACK:
            fresh = [(self.policy.rank(key), next(self._arrivals), key) for key in self._candidates]
            self._heap = fresh
            heapq.heapify(self._heap)
