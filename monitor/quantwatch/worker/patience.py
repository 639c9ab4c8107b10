"""Writing down how an attempt ended, although the database may be locked or restarting."""

import threading
import time
from collections.abc import Callable

from quantwatch.errors import LeaseLostError, StoreError
from quantwatch.observability import logs
from quantwatch.store.leases import Claim

log = logs.get(__name__)
_AGAIN_S = 0.5


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
