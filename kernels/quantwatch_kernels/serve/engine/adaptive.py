"""How many requests run at once: from measured latency and free memory, without oscillating.

A step is *bad* when it takes longer than the target, or leaves less than `low_free` of the pool
free; it *has room* when it takes less than (1 − band) of the target and leaves more than
`high_free`. Between the two nothing changes: that is the hysteresis.

    bad for `patience` steps       back to the largest number known to be good, or half;
                                   this number is the ceiling
    room for `patience` steps,     twice as many as long as nothing was bad,
      and somebody waits           else half of the way to the ceiling

A ceiling is remembered, so under a constant load the search is a bisection and ends; what AIMD
does, to try the bad number again and again, can't happen. It is forgotten when the load is another:
when a number that was measured before takes `drift` less time than it did, or leaves that much more
of the pool free.

After a change the first `dwell` steps count for nothing, nor do steps with more running than
allowed: nobody is sent away when the number falls. Steps with fewer say nothing good of the number.
Latency is the median of `patience` steps, so a single slow step is none. Pure: no clock, no tensor.
"""

from dataclasses import dataclass, field
from statistics import median

__all__ = ["AdaptiveBatch", "AdaptiveRule", "StepReport"]


@dataclass(frozen=True, slots=True)
class AdaptiveRule:
    """What is aimed at. Raises ValueError for what can't be."""

    target_s: float
    """Seconds a step should take at most."""
    most: int
    """Requests that may run at once at most."""
    band: float = 0.2
    low_free: float = 0.05
    high_free: float = 0.15
    patience: int = 4
    dwell: int = 2
    drift: float = 0.3

    def __post_init__(self) -> None:
        if not self.target_s > 0 or self.most < 1:
            raise ValueError(
                f"target_s must be above 0 s and most at least 1; got {self.target_s}, {self.most}."
            )
        if not 0 < self.band < 1 or not 0 < self.drift < 1:
            raise ValueError(
                f"band and drift lie between 0 and 1; they are {self.band} and {self.drift}."
            )
        if not 0 <= self.low_free < self.high_free <= 1:
            raise ValueError(
                "0 ≤ low_free < high_free ≤ 1 is needed, or nothing would lie between; "
                f"got {self.low_free} and {self.high_free}."
            )
        if self.patience < 1 or self.dwell < 0:
            raise ValueError(
                f"patience is at least 1 and dwell 0; they are {self.patience} and {self.dwell}."
            )


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: seconds, share of the pool that is free, who ran and who waits."""

    seconds: float
    free: float
    running: int
    waiting: int


@dataclass(slots=True)
class AdaptiveBatch:
    """The controller's state; `limit` is the number of requests that may run now."""

    rule: AdaptiveRule
    limit: int = 1
    ceiling: int | None = None
    """The smallest number known to be bad."""
    good: int = 0
    """The largest number known to be good; 0: none."""
    changes: int = 0
    _level: dict[int, tuple[float, float]] = field(default_factory=dict)
    _seen: list[StepReport] = field(default_factory=list)
    _ignore: int = 0

    def observe(self, report: StepReport) -> int:
        """Take a step in; return the limit from now on."""
        if not report.seconds >= 0 or not 0 <= report.free <= 1:
            raise ValueError(
                f"a step takes 0 s or more and leaves a share free; got {report.seconds} s, "
                f"{report.free}."
            )
        if report.running > self.limit:
            return self.limit  # who ran before the number fell runs on; that says nothing of it
        if self._ignore > 0:
            self._ignore -= 1
            return self.limit
        self._seen.append(report)
        if len(self._seen) >= self.rule.patience:
            self._decide(self._seen)
            self._seen = []
        return self.limit

    def _decide(self, seen: list[StepReport]) -> None:
        rule = self.rule
        seconds, free = median(one.seconds for one in seen), median(one.free for one in seen)
        full = all(one.running >= self.limit for one in seen)
        if full:
            self._compare(seconds, free)
        if seconds > rule.target_s or free < rule.low_free:
            self._shrink(max(1, *(one.running for one in seen)))
            return
        if not full:
            return
        self.good = max(self.good, self.limit)
        room = seconds < (1 - rule.band) * rule.target_s and free > rule.high_free
        if room and all(one.waiting for one in seen):
            self._grow()

    def _shrink(self, bad: int) -> None:
        """The number that ran is too many."""
        self.ceiling = bad if self.ceiling is None else min(self.ceiling, bad)
        if self.good >= self.ceiling:
            self.good = 0  # the load is heavier than it was
        self._set(max(1, self.good or bad // 2))

    def _grow(self) -> None:
        most = self.rule.most
        if self.ceiling is None:
            self._set(min(most, 2 * self.limit))
        else:
            self._set(min(most, max(self.limit, (self.limit + self.ceiling) // 2)))

    def _compare(self, seconds: float, free: float) -> None:
        before = self._level.setdefault(self.limit, (seconds, free))
        drift = self.rule.drift
        if seconds < (1 - drift) * before[0] or free - before[1] > drift:
            self.ceiling, self.good = None, 0
            self._level = {self.limit: (seconds, free)}
        elif seconds > (1 + drift) * before[0] or before[1] - free > drift:
            # Heavier: when it is over, that is to be noticed as well.
            self._level[self.limit] = (seconds, free)

    def _set(self, limit: int) -> None:
        if limit != self.limit:
            self.limit = limit
            self.changes += 1
            self._ignore = self.rule.dwell
