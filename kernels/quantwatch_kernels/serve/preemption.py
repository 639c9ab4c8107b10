"""When requests must make room, and how: watermarks, and recompute against swap.

A watermark with hysteresis: room is made once less than `low` of the pool is idle, and until `high`
is. One threshold would swap a request out and in again at every token.

A preempted request comes back either by computing its keys and values again or from the host:

    swap         2 · (latency + bytes ÷ bandwidth)        out now, in later
    recompute    a·n + b·n²                               n tokens that the prefix cache won't have

The costs are measured by the caller, in seconds; the smaller wins, and ties go to recompute, which
needs no room. Without room in the host tier there is no choice. Long texts swap, short ones
recompute; where the two meet depends on the machine, so no length is built in.
"""

from dataclasses import dataclass
from math import ceil, isfinite
from typing import Literal, NamedTuple

__all__ = ["Choice", "PreemptionCosts", "Watermark", "choose"]


@dataclass(frozen=True, slots=True)
class Watermark:
    """Shares of the pool that should be idle: act below `low`, stop at `high`."""

    low: float = 0.01
    high: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"0 ≤ low ≤ high ≤ 1 is needed; got {self.low} and {self.high}.")

    def blocks_to_free(self, num_free: int, num_blocks: int) -> int:
        """Return how many blocks to make idle now; 0 while `low` or more are.

        `num_blocks` counts the blocks that can be used.
        """
        if num_blocks < 1 or not 0 <= num_free <= num_blocks:
            raise ValueError(f"{num_free} of {num_blocks} blocks can't be free.")
        if num_free >= self.low * num_blocks:
            return 0
        # Rounded up (5 % of 7 blocks is one, not none), but 7 % of 100 is 7: floats say 7.0…01.
        return max(0, ceil(self.high * num_blocks - 1e-9) - num_free)


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Measured costs. Seconds, and bytes per second; all finite, none negative."""

    latency_s: float
    bandwidth: float
    seconds_per_token: float
    seconds_per_token_squared: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and at least 0; it is {value}.")
        if self.bandwidth == 0:
            raise ValueError("bandwidth must be above 0 bytes per second; it is 0.")

    def swap_s(self, num_bytes: int) -> float:
        """Return the seconds that swapping so many bytes out and in takes."""
        return 2 * (self.latency_s + num_bytes / self.bandwidth)

    def recompute_s(self, num_tokens: int) -> float:
        """Return the seconds that computing so many tokens again takes."""
        return self.seconds_per_token * num_tokens + self.seconds_per_token_squared * num_tokens**2


class Choice(NamedTuple):
    """What to do with a preempted request, and what either would cost."""

    how: Literal["swap", "recompute"]
    swap_s: float
    recompute_s: float


def choose(
    costs: PreemptionCosts, *, num_pages: int, page_bytes: int, num_tokens: int, free_slots: int
) -> Choice:
    """Choose for a request of so many pages; `num_tokens` are those no prefix cache will have."""
    for name, value in (("num_pages", num_pages), ("num_tokens", num_tokens)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0; it is {value}.")
    swap, again = costs.swap_s(num_pages * page_bytes), costs.recompute_s(num_tokens)
    fits = num_pages <= free_slots
    return Choice("swap" if fits and swap < again else "recompute", swap, again)
