"""What is counted of one model's forward passes: the coverage proof and what kernels did unasked.

Taken off a probe after each piece of a night, so that pieces that were measured elsewhere add up to
what one process would have counted, in the same order.
"""

from collections import Counter
from dataclasses import dataclass, field

from quantwatch.domain import Scope
from quantwatch_kernels.registry import Watch


@dataclass(slots=True)
class Counts:
    """Counters of forward passes under observation."""

    num_forwards: int = 0
    firings: Counter[Scope] = field(default_factory=Counter)
    """Scope → how often it fired."""
    watch: Watch = field(default_factory=Watch)
    overflows: Counter[str] = field(default_factory=Counter)
    """Module path → values that a narrow residual stream made infinite."""

    def add(self, other: "Counts") -> None:
        """Add what was counted elsewhere; of equally frequent events the first seen stay first."""
        self.num_forwards += other.num_forwards
        self.firings.update(other.firings)
        self.watch.fallbacks.update(other.watch.fallbacks)
        self.watch.slow.update(other.watch.slow)
        self.overflows.update(other.overflows)
