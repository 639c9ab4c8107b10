"""Notice that a clock was set: it and the monotonic clock went on by different amounts."""

from datetime import datetime, timedelta

TOLERATED = timedelta(seconds=60)


class JumpDetector:
    """Compares two looks at both clocks; the first look has nothing to compare with."""

    def __init__(self) -> None:
        self._before: tuple[datetime, float] | None = None

    def jump(self, wall: datetime, monotonic_s: float) -> timedelta | None:
        """Return by how much the wall clock was set since the last look; None when it wasn't."""
        before, self._before = self._before, (wall, monotonic_s)
        if before is None:
            return None
        found = (wall - before[0]) - timedelta(seconds=monotonic_s - before[1])
        return found if abs(found) > TOLERATED else None
