"""Writing down how an attempt ended, although the database may be locked or restarting."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from quantwatch.errors import LeaseLostError, StoreError
from quantwatch.observability import logs
from quantwatch.store import leases
from quantwatch.store.leases import Claim
from quantwatch.store.reaper import REAP_EVERY_S

log = logs.get(__name__)
_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between and after things."""

    poll_s: float = 1.0
    """Between two looks into the queue."""
    look_s: float = 1.0
    """Between two looks at the run that is carried out."""
    reap_s: float = REAP_EVERY_S
    lease_s: float = leases.LEASE_S
    shutdown_s: float = 30.0
    """How long a run may still take once the worker is told to stop."""
    kill_after_s: float = 10.0
    """How long a run may take to stop by itself when it was cancelled or is overdue."""


def insist(write: Callable[[], object], claim: Claim, until: threading.Event | None = None) -> bool:
    """Write until it is done or somebody else has the run, for as long as a lease lasts at least.

    With `until`, go on until that is set. False when it was given up: it is the reaper's then.
    """
    give_up = time.monotonic() + claim.lease_s
    while True:
        try:
            write()
            return True
        except LeaseLostError as error:
            log.debug("nothing left to end", run=claim.run_id, reason=str(error))
            return True
        except StoreError as error:
            log.warning("the end can't be written yet", run=claim.run_id, reason=str(error))
            if time.monotonic() >= give_up and (until is None or until.is_set()):
                return False
            threading.Event().wait(_AGAIN_S)
