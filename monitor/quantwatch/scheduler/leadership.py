"""Whether this process schedules: it asks the database now and then, and trusts no answer long."""

import threading
import time
from collections.abc import Callable

from quantwatch.errors import StoreError
from quantwatch.observability import logs, meters
from quantwatch.store import leader
from quantwatch.store.leader import Lease
from quantwatch.store.session import Database

log = logs.get(__name__)

RENEW_S = 10.0
_TTL_S = leader.TTL.total_seconds()
_MARGIN_S = 5.0
"""With less of the lease left than this, nothing new is begun."""


class Leadership:
    """The lease as one process sees it. Safe to share between threads."""

    def __init__(
        self, db: Database, holder: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._db = db
        self._holder = holder
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._until = 0.0

    @property
    def epoch(self) -> int | None:
        """Number of take-overs up to ours; None while this process doesn't lead."""
        with self._lock:
            return None if self._lease is None or self._left() < _MARGIN_S else self._lease.epoch

    def hold(self) -> bool:
        """Take the lease, or renew it when it is time; say whether this process leads.

        A renewal that fails ends the leadership. Raises StoreError on a database error.
        """
        with self._lock:
            if self._lease is None or self._left() <= _TTL_S - RENEW_S:
                try:
                    self._ask()
                except StoreError:
                    self._set(None)
                    raise
            return self._lease is not None

    def let_go(self) -> None:
        """Give the lease back, so that the next one leads at once. Raises StoreError."""
        with self._lock:
            lease = self._lease
            self._set(None)
        if lease is not None:
            leader.release(self._db, lease)

    def _left(self) -> float:
        return self._until - self._monotonic()

    def _ask(self) -> None:
        # Counted from before the question: the answer may have taken long.
        asked = self._monotonic()
        lease = self._lease
        if lease is None or not leader.renew(self._db, lease):
            self._set(None)
            lease = leader.acquire(self._db, self._holder)
        self._until = asked + _TTL_S
        self._set(lease)

    def _set(self, lease: Lease | None) -> None:
        if lease != self._lease:
            words = "this process schedules" if lease else "this process schedules no longer"
            log.info(words, holder=self._holder, epoch=lease.epoch if lease else None)
        self._lease = lease
        meters.IS_LEADER.set(lease is not None)
