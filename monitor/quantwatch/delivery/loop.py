"""The deliverer: one lane per endpoint, so that a slow one delays nobody, and a housekeeper."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery import notices
from quantwatch.delivery.backoff import LONGEST_S
from quantwatch.delivery.client import Client
from quantwatch.delivery.lane import Lane
from quantwatch.observability import logs, meters
from quantwatch.store import clock, dead_letters, deliveries, digests
from quantwatch.store.endpoints import sync_endpoints
from quantwatch.store.lock_order import hold_outbox
from quantwatch.store.session import Database

log = logs.get(__name__)

IDLE_S = 1.0
"""How long an idle lane waits before it looks again, unless it is woken."""
HOUSEKEEPING_S = 15.0
MOST_AT_ONCE = 16
"""Lanes that `run_once` drives at the same time."""
PATIENCE = timedelta(hours=1)
"""How long a message waits for an endpoint that this configuration doesn't know (a roll-out)."""


class Deliverer:
    """Tells the endpoints what is in the outbox. Any number may run on one database."""

    def __init__(
        self, db: Database, endpoints: Mapping[str, Endpoint], client: Client | None = None
    ) -> None:
        self.db = db
        self._client = client or Client()
        self._lanes = {
            name: Lane(db, one, self._client, deaf=notices.deaf(endpoints))
            for name, one in endpoints.items()
        }
        self._stopping = threading.Event()
        self._woken = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._synced = False
        self.failure: BaseException | None = None
        """What ended a thread: no ordinary error does."""

    def start(self) -> None:
        """Deliver in the background until `stop`. Raises StoreError."""
        self.tidy()
        self._stopping.clear()
        jobs = {f"lane-{name}": partial(self._deliver, lane) for name, lane in self._lanes.items()}
        self._threads = [
            # Daemons: a lane that hangs must not keep the process from ending.
            threading.Thread(target=self._forever, args=(job,), name=name, daemon=True)
            for name, job in (jobs | {"deliveries": self._keep_house}).items()
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, within_s: float = 30.0) -> bool:
        """Finish what is on its way; False when that took longer (its lease then runs out)."""
        self._stopping.set()
        self.wake()
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def is_alive(self) -> bool:
        """Whether it was started and all its threads work."""
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    def wake(self) -> None:
        """Let idle lanes look at once: something was published."""
        with self._woken:
            self._woken.notify_all()

    def run_once(self, most: int = 1000) -> int:
        """Tidy up, then send what is due, up to so many messages per endpoint; return how many."""
        self.tidy()
        faster_first = sorted(self._lanes.values(), key=lambda lane: lane.last_duration_s)
        with ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="quantwatch-lane") as pool:
            return sum(pool.map(lambda lane: lane.drain(most), faster_first))

    def tidy(self) -> None:
        """Take back lost leases, bury what nobody can be told, measure the queue's age."""
        settings = {name: lane.endpoint.settings_sha for name, lane in self._lanes.items()}
        with self.db.writer() as session:
            hold_outbox(session)
            if not self._synced:
                sync_endpoints(session, settings)
            now = clock.now(session)
            lost = deliveries.take_back(session)
            unknown = dead_letters.to_unknown(list(settings), now - PATIENCE)
            buried = dead_letters.bury(session, unknown, "its endpoint is not configured")
            buried += digests.end_members(session)
            mended = deliveries.mend_waits(session, LONGEST_S)
            oldest = dead_letters.oldest_open_at(session)
        self._synced = True
        age = 0.0 if oldest is None else max(0.0, (now - oldest).total_seconds())
        meters.OLDEST_PENDING.set(age)
        if lost or buried or mended:
            facts = {"lost_leases": lost, "buried": buried, "wrong_times": mended}
            log.warning("deliveries tidied up", **facts)

    def _deliver(self, lane: Lane) -> float:
        lane.drain(1000, self._stopping.is_set)
        return IDLE_S

    def _keep_house(self) -> float:
        self.tidy()
        return HOUSEKEEPING_S

    def _forever(self, job: Callable[[], float]) -> None:
        """Repeat a job; a database that is away is waited for, longer each time, up to a minute."""
        trouble_s = IDLE_S
        while not self._stopping.is_set():
            try:
                wait_s, trouble_s = job(), IDLE_S
            except Exception as error:  # noqa: BLE001 - a lane that ends would end it silently
                log.error("delivery is interrupted", error=error, retry_in_s=trouble_s)
                wait_s, trouble_s = trouble_s, min(60.0, 2 * trouble_s)
            except BaseException as error:
                self.failure = error
                raise
            self._pause(wait_s)

    def _pause(self, seconds: float) -> None:
        with self._woken:
            if not self._stopping.is_set():
                self._woken.wait(seconds)
