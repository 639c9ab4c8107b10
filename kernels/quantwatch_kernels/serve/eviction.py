"""Which idle block's content is given up: LRU, LRU-K and segmented LRU.

A policy ranks *contents* (by their digest), not block ids: what it knows about a text outlives the
page the text happened to be in. The lowest rank goes first; only leaves of the prefix tree that
nobody uses are ever asked about (`victims.py`).

LRU        rank = last use. A single long document that nobody asks for again flushes everything.
LRU-K      rank = (K-th last reference, last use); fewer than K references: −∞, so one-time content
           goes before what was asked for twice, oldest first. (O'Neil, O'Neil & Weikum 1993.)
           References of one request, or within `correlated` of the last one, are one reference: a
           retry or a burst is no sign of a second reader. When a burst is over its length is taken
           out of the history. While it may go on (last use within `correlated`) the content goes
           last, or every newcomer would leave before it could be asked for again. History is
           retained after eviction for the `retained` contents given up last: without it a text
           that returns later than it is kept never counts to K.
SLRU       two LRU lists. A second reference moves content into the protected one; what overflows
           there goes back to the probationary one, which is evicted first.

Times are whatever the owner's clock counts, requests by default.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

__all__ = ["LRU", "LRUK", "POLICIES", "SLRU", "EvictionPolicy", "Rank", "make_policy"]

Rank = tuple[float, ...]


class _Use(NamedTuple):
    now: float
    source: Hashable


class EvictionPolicy(ABC):
    """Ranks contents by their uses. All steps take constant time."""

    def __init__(self) -> None:
        self._ticks = 0
        self._last: dict[Hashable, int] = {}

    def reference(self, key: Hashable, now: float, source: Hashable = None) -> Iterable[Hashable]:
        """Count a use by `source` (a request) and return the keys whose rank changed."""
        self._touch(key)
        return (key, *self._count(key, _Use(now, source)))

    def release(self, key: Hashable, now: float) -> None:
        """Hear that a use has ended: it lasted until now, and is no new reference."""
        self._touch(key)
        self._ended(key, now)

    def evicted(self, key: Hashable) -> None:
        """Hear that a content isn't kept any more."""
        del self._last[key]
        self._forget(key)

    def advance(self, now: float) -> Iterable[Hashable]:  # noqa: ARG002
        """Move on to a time before anything happens then; return the keys whose rank changed."""
        return ()

    @abstractmethod
    def rank(self, key: Hashable) -> Rank:
        """Return what the owner sorts by; the lowest goes first."""

    def _count(self, key: Hashable, use: _Use) -> Iterable[Hashable]:  # noqa: ARG002
        """Count a use beyond its time; return other keys whose rank changed. LRU needs no more."""
        return ()

    def _ended(self, key: Hashable, now: float) -> None:  # noqa: B027 — most need no note
        """Note the end of a use."""

    def _forget(self, key: Hashable) -> None:  # noqa: B027 — LRU knows nothing more
        """Drop what is known of an evicted content, or retain it."""

    def _touch(self, key: Hashable) -> None:
        # Uses within one tick of the owner's clock still have an order.
        self._ticks += 1
        self._last[key] = self._ticks


class LRU(EvictionPolicy):
    """Least recently used goes first."""

    def rank(self, key: Hashable) -> Rank:
        """Return the last use."""
        return (self._last[key],)


@dataclass(slots=True)
class _History:
    """The last K uncorrelated references and who made them, latest first; the burst's end."""

    times: list[float] = field(default_factory=list)
    sources: list[Hashable] = field(default_factory=list)
    last: float = -inf


class LRUK(EvictionPolicy):
    """The content whose K-th last reference is longest ago goes first."""

    def __init__(self, k: int = 2, *, correlated: float = 0.0, retained: int = 4096) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"k must be at least 1; it is {k}.")
        if not correlated >= 0:
            raise ValueError(f"correlated must be at least 0; it is {correlated}.")
        if retained < 0:
            raise ValueError(f"retained must be at least 0 contents; it is {retained}.")
        self.k, self.correlated, self.retained = k, correlated, retained
        self._recent: OrderedDict[Hashable, None] = OrderedDict()
        self._resident: dict[Hashable, _History] = {}
        self._gone: OrderedDict[Hashable, _History] = OrderedDict()

    def rank(self, key: Hashable) -> Rank:
        """Return whether it was used just now, its K-th last reference (or −∞), its last use."""
        if key in self._recent:
            return (1, self._last[key])
        times = self._resident[key].times
        return (0, times[-1] if len(times) == self.k else -inf, self._last[key])

    def advance(self, now: float) -> Iterable[Hashable]:
        """Let go of what was last used longer ago than the correlated period."""
        passed = list[Hashable]()
        for key in self._recent:  # in the order of their last use
            if now - self._resident[key].last <= self.correlated:
                break
            passed.append(key)
        for key in passed:
            del self._recent[key]
        return passed

    @property
    def num_retained(self) -> int:
        """Evicted contents whose history is retained."""
        return len(self._gone)

    def _count(self, key: Hashable, use: _Use) -> Iterable[Hashable]:
        now, source = use
        history = self._resident.get(key)
        resident = history is not None
        if history is None:
            history = self._resident[key] = self._gone.pop(key, _History())
        same = source is not None and source in history.sources
        if history.times and (same or now - history.last <= self.correlated):
            history.last = max(history.last, now)
        else:
            burst = history.last - history.times[0] if history.times and resident else 0.0
            kept = [time + burst for time in history.times[: self.k - 1]]
            history.times, history.last = [now, *kept], now
            history.sources = [source, *history.sources[: self.k - 1]]
        self._protect(key)
        return ()

    def _ended(self, key: Hashable, now: float) -> None:
        history = self._resident[key]
        history.last = max(history.last, now)
        self._protect(key)

    def _protect(self, key: Hashable) -> None:
        if self.correlated > 0:
            self._recent[key] = None
            self._recent.move_to_end(key)

    def _forget(self, key: Hashable) -> None:
        self._gone[key] = self._resident.pop(key)
        self._recent.pop(key, None)
        while len(self._gone) > self.retained:
            self._gone.popitem(last=False)


class SLRU(EvictionPolicy):
    """Content with a second reference is protected, as far as the protected segment reaches."""

    def __init__(self, protected: int) -> None:
        super().__init__()
        if protected < 0:
            raise ValueError(f"protected must be at least 0 blocks; it is {protected}.")
        self.protected = protected
        self._source: dict[Hashable, Hashable] = {}
        self._protected: OrderedDict[Hashable, None] = OrderedDict()

    def rank(self, key: Hashable) -> Rank:
        """Return the segment (0: probationary), then the last use."""
        return (1 if key in self._protected else 0, self._last[key])

    def _count(self, key: Hashable, use: _Use) -> Iterable[Hashable]:
        known = key in self._source
        same = use.source is not None and use.source == self._source.get(key)
        self._source[key] = use.source
        if not known or (same and key not in self._protected):
            return ()
        self._protected[key] = None
        self._protected.move_to_end(key)
        if len(self._protected) <= self.protected:
            return ()
        demoted, _ = self._protected.popitem(last=False)
        self._touch(demoted)  # it enters the other list as its most recent
        return (demoted,)

    def _ended(self, key: Hashable, now: float) -> None:  # noqa: ARG002 — order is enough
        if key in self._protected:
            self._protected.move_to_end(key)

    def _forget(self, key: Hashable) -> None:
        del self._source[key]
        self._protected.pop(key, None)


_CORRELATED = 8.0
POLICIES = ("lru", "lru-k", "slru")


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """Return a policy for a pool of so many blocks, with the field's usual parameters.

    LRU-2 has a correlated period of 8 requests (of 0 … 64 the best over three drawn workloads that
    aren't the recorded ones, `trace_workload.py`) and retains the history of 8 pools' worth of
    contents; SLRU protects 80 % of the pool.
    Raises ValueError naming the policies that exist.
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1; it is {num_blocks}.")
    if name == "lru":
        return LRU()
    if name == "lru-k":
        return LRUK(2, correlated=_CORRELATED, retained=8 * num_blocks)
    if name == "slru":
        return SLRU(num_blocks * 4 // 5)
    raise ValueError(f"no eviction policy {name!r}; there are {', '.join(POLICIES)}.")
