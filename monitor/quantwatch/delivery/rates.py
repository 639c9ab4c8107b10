"""How many messages an endpoint gets: a token bucket that never lets more than R through a minute.

A bucket of b tokens that refills with f a minute lets b + f through at most, so b + f = R + 1, and
the last one only when the minute is over.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

LONGEST_PAUSE_S = 300.0
"""A receiver that throttles is left alone for so long at most before the next message."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is left of an endpoint's rate, when it was last counted."""

    tokens: float
    at: datetime

    def refilled(self, per_minute: int, now: datetime) -> "Bucket":
        """Return the bucket as it is now; a clock that went back, or a pause, adds nothing."""
        if self._is_from_a_wrong_clock(now):
            return Bucket(self.tokens, now)
        if now <= self.at:
            return self
        added = (now - self.at).total_seconds() * refill_per_minute(per_minute) / 60
        return Bucket(min(float(capacity(per_minute)), self.tokens + added), now)

    def spent(self) -> "Bucket":
        """Return the bucket after one message. Raises ValueError when it is empty."""
        if self.tokens < 1:
            raise ValueError(f"{self.tokens} tokens are not enough for a message")
        return Bucket(self.tokens - 1, self.at)

    def paused(self, now: datetime, seconds: float | None) -> "Bucket":
        """Return an empty bucket that refills from the end of the pause on."""
        until = now + timedelta(seconds=min(seconds or 0.0, LONGEST_PAUSE_S))
        return Bucket(0.0, until if self._is_from_a_wrong_clock(now) else max(self.at, until))

    def _is_from_a_wrong_clock(self, now: datetime) -> bool:
        """Say whether it was counted later than any pause explains: the clock was wrong then."""
        return self.at - now > timedelta(seconds=LONGEST_PAUSE_S)


def capacity(per_minute: int) -> int:
    """Return how many messages may go at once."""
    return (per_minute + 1) // 2


def refill_per_minute(per_minute: int) -> int:
    """Return how many tokens a minute adds."""
    return per_minute + 1 - capacity(per_minute)
