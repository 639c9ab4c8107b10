"""Maintenance windows: a cron that says when one begins, and how long it lasts."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from quantwatch.schedules.instants import Cron, instants, next_instant


@dataclass(frozen=True, slots=True)
class Window:
    """Begins at each instant of `begins` and lasts `length` of elapsed time. Its end is outside."""

    begins: Cron
    length: timedelta

    def __contains__(self, instant: datetime) -> bool:
        """Say whether an instant lies in a window."""
        return next_instant(self.begins, instant - self.length) <= instant

    def end(self, instant: datetime) -> datetime | None:
        """Return when the window that an instant lies in ends, in UTC; None outside.

        Windows that overlap are one window, whose end is that of the newest already begun.
        """
        last = None
        for begun in instants(self.begins, instant - self.length, instant):
            last = begun
        return None if last is None else last + self.length
