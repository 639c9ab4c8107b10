"""The part `delivery`: a deliverer for the endpoints in use, replaced when they change."""

import threading
from collections.abc import Mapping

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.loop import Deliverer
from quantwatch.observability import logs
from quantwatch.service.configuration import Current
from quantwatch.store.session import Database

_HAND_OVER_S = 30.0
"""How long the one before may finish what is on its way."""
log = logs.get(__name__)


class Delivering:
    """Delivers with the endpoints of the configuration in use."""

    name = "delivery"

    def __init__(self, db: Database, current: Current) -> None:
        self._db, self._current = db, current
        self._lock = threading.Lock()
        self._deliverer: Deliverer | None = None
        self._endpoints: Mapping[str, Endpoint] = {}
        self._replacing = False

    @property
    def failure(self) -> BaseException | None:
        """What it died of."""
        return None if self._deliverer is None else self._deliverer.failure

    @property
    def is_alive(self) -> bool:
        """Whether its threads work, or are just being replaced."""
        return self._replacing or (self._deliverer is not None and self._deliverer.is_alive)

    def start(self) -> None:
        """Begin to deliver."""
        with self._lock:
            loaded = self._current.loaded
            self._endpoints = dict(loaded.endpoints)
            self._deliverer = Deliverer(self._db, loaded.endpoints)
            self._deliverer.start()

    def stop(self, wait_s: float) -> None:
        """Finish what is on its way."""
        with self._lock:
            if self._deliverer is not None:
                self._deliverer.stop(wait_s)

    def refresh(self) -> None:
        """Go on with the endpoints of the configuration in use, if they are others now."""
        loaded = self._current.loaded
        # Not the digests: they leave out what changes no address, such as the rate.
        if dict(loaded.endpoints) == self._endpoints:
            return
        self._replacing = True
        try:
            self.stop(_HAND_OVER_S)
            self.start()
        finally:
            self._replacing = False
        log.info("endpoints replaced", endpoints=", ".join(loaded.endpoints) or "none")
