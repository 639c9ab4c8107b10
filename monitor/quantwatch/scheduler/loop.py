"""The scheduler: woken by APScheduler, which knows one job and no schedule.

APScheduler runs in UTC with jobs in memory: its own cron trigger loses nights, and its SQL store
unpickles code. A second thread holds the lease and wakes a clock that has stopped.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from quantwatch.errors import StoreError
from quantwatch.observability import logs, meters
from quantwatch.scheduler import batches
from quantwatch.scheduler.jumps import JumpDetector
from quantwatch.scheduler.leadership import RENEW_S, Leadership
from quantwatch.store import clock, components, figures, schedules
from quantwatch.store.components import Component
from quantwatch.store.session import Database
from quantwatch.telemetry import new_run_id

log = logs.get(__name__)

LONGEST_SLEEP_S = 30.0
_SHORTEST_SLEEP_S = 0.05
_WAKE = "wake"


@dataclass
class _Progress:
    """What one scheduler remembers from look to look; losing it costs nothing."""

    epoch: int | None = None
    ticked_at_s: float = 0.0
    last_tick: float | None = None
    jumps: JumpDetector = field(default_factory=JumpDetector)


class Scheduler:
    """Queues the slots of all checks. `start` and `stop` for a service, `tick` for one look."""

    name = "scheduler"
    failure: BaseException | None = None
    """What a thread of it died of: a mistake of ours, since errors of the database are survived."""

    def __init__(
        self,
        db: Database,
        *,
        holder: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        host, pid = socket.gethostname(), os.getpid()
        self.id = holder or f"scheduler:{host}:{pid}:{new_run_id()[-6:]}"
        self._db = db
        self._monotonic = monotonic
        self._leadership = Leadership(db, self.id, monotonic)
        self._component = Component(self.id, "scheduler", host, pid)
        self._seen = _Progress()
        self._ticking, self._ringing = threading.Lock(), threading.Lock()
        self._stopping = threading.Event()
        self._keeper: threading.Thread | None = None
        self._alarm: BackgroundScheduler | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its threads work; after `stop`, whether one is left behind."""
        keeper, alarm = self._keeper, self._alarm
        works = keeper is not None and keeper.is_alive()
        if self._stopping.is_set():
            return works or self._ticking.locked()
        return works and alarm is not None and alarm.running

    @property
    def is_leader(self) -> bool:
        """Whether this process schedules now."""
        return self._leadership.epoch is not None

    def start(self) -> None:
        """Begin to work in threads of its own; the first look is at once."""
        if self._alarm is not None:
            raise RuntimeError(f"{self.id} has been started already")
        self._seen.ticked_at_s = self._monotonic()
        self._alarm = BackgroundScheduler(
            timezone=UTC, jobstores={"default": MemoryJobStore()}, daemon=True
        )
        options = {"id": _WAKE, "coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        first = {"seconds": LONGEST_SLEEP_S, "next_run_time": datetime.now(UTC)}
        self._alarm.add_job(self._wake, "interval", **options, **first)
        self._alarm.start()
        self._keeper = threading.Thread(target=self._keep, name="scheduler-lease", daemon=True)
        self._keeper.start()

    def ask_to_stop(self) -> None:
        """Begin no look any more. Returns at once."""
        with self._ringing:
            # After this nobody sets the alarm, which could wait for its shutdown and be waited for.
            self._stopping.set()

    def stop(self, wait_s: float | None = None) -> None:
        """End after the look under way, and give the lease back. Raises StoreError.

        Waits for `wait_s` seconds at most. When the look doesn't end, `is_alive` stays true and the
        lease is left to run out.
        """
        self.ask_to_stop()
        until = None if wait_s is None else time.monotonic() + wait_s
        if self._alarm is not None and self._alarm.running:
            self._alarm.shutdown(wait=False)
        if self._keeper is not None:
            self._keeper.join(_left(until))
        if self._ticking.acquire(timeout=_left(until) or (-1 if until is None else 0)):
            self._ticking.release()
        if self.is_alive:
            return
        self._alarm = self._keeper = None
        self._leadership.let_go()
        with self._db.writer() as session:
            components.note_gone(session, [self.id])

    def tick(self) -> int:
        """Deal with all slots that are due, if this process leads; return how many checks had some.

        Raises StoreError on a database error; nothing is lost, the next tick does it.
        """
        with self._ticking:
            if self._stopping.is_set():
                return 0
            if not self._leadership.hold():
                self._seen.epoch = None
                return 0
            self._look_around()
            return batches.work(self._db, self._stopping)

    def keep_alive(self) -> None:
        """Renew the lease, show that this process lives, ring a late alarm. Raises StoreError."""
        self._leadership.hold()
        details = {"epoch": self._leadership.epoch, figures.LAST_TICK: self._seen.last_tick}
        with self._db.writer() as session:
            components.note_seen(session, self._component, details)
        self._rouse()

    def _look_around(self) -> None:
        """Compute everything anew after a take-over (newer zones, perhaps) and a set clock."""
        with self._db.reader() as session:
            now = clock.now(session)
        epoch = self._leadership.epoch
        jump = self._seen.jumps.jump(now, self._monotonic())
        if jump is not None:
            seconds = round(jump.total_seconds())
            log.warning("the clock was set; slots are computed anew", by_seconds=seconds)
        if jump is not None or epoch != self._seen.epoch:
            with self._db.writer() as session:
                schedules.look_again(session)
        self._seen.epoch = epoch
        self._seen.last_tick = now.timestamp()
        meters.LAST_TICK.set(now.timestamp())

    def _wake(self) -> None:
        """Tick, then set the alarm: whatever happens, there is a next time."""
        pause = LONGEST_SLEEP_S
        try:
            self.tick()
            pause = self._pause()
        except StoreError as error:
            log.error("the scheduler can't reach its database; it tries again", error=error)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._seen.ticked_at_s = self._monotonic()
            self._ring_in(pause)

    def _pause(self) -> float:
        """Return how long to sleep, in seconds: to the next look by the database's clock."""
        with self._db.reader() as session:
            now, coming = clock.now(session), schedules.next_look(session)
        if coming is None or not self.is_leader:
            return LONGEST_SLEEP_S
        wait = (coming - now).total_seconds()
        return min(max(wait, _SHORTEST_SLEEP_S), LONGEST_SLEEP_S)

    def _ring_in(self, pause_s: float) -> None:
        with self._ringing:
            if self._alarm is not None and not self._stopping.is_set():
                at = datetime.now(UTC) + timedelta(seconds=pause_s)
                self._alarm.modify_job(_WAKE, next_run_time=at)

    def _rouse(self) -> None:
        """Ring now if it has long been quiet: the host's clock was set back, its alarm was not."""
        quiet = self._monotonic() - self._seen.ticked_at_s
        if quiet > LONGEST_SLEEP_S + RENEW_S and not self._ticking.locked():
            log.warning("the scheduler's alarm is late; it is rung now", by_seconds=round(quiet))
            self._ring_in(0)

    def _keep(self) -> None:
        try:
            self._keep_alive_unless_away()
            while not self._stopping.wait(RENEW_S):
                self._keep_alive_unless_away()
        except BaseException as error:
            self.failure = error
            raise

    def _keep_alive_unless_away(self) -> None:
        try:
            self.keep_alive()
        except StoreError as error:
            log.error("the scheduler can't show that it is alive", error=error)


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
