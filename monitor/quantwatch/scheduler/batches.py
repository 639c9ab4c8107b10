"""All looks of one tick: every check that is due, whatever becomes of the one before."""

import threading

from quantwatch.errors import StoreError
from quantwatch.scheduler import step
from quantwatch.store import clock, schedules
from quantwatch.store.session import Database

_LOOKS_PER_BATCH = 50
_LOOKS_PER_TICK = 2000
"""Then others get their turn (the lease, a stop); the next tick goes on at once."""
_TROUBLES_PER_TICK = 3
"""Each may have waited for a lock as long as anybody waits."""


def work(db: Database, stopping: threading.Event) -> int:
    """Look at the checks that are due; return how many had slots.

    Raises StoreError on a database error, after those whose rows could be had; the next tick does
    the others.
    """
    handled = looks = 0
    troubles: list[StoreError] = []
    while looks < _LOOKS_PER_TICK and not troubles:
        with db.reader() as session:
            due = schedules.due(session, _LOOKS_PER_BATCH)
        if not due:
            break
        for check_id in due:
            if stopping.is_set():
                return handled
            handled += _look_or_note(db, check_id, troubles)
        looks += len(due)
    if troubles:
        raise troubles[0]
    return handled


def _look_or_note(db: Database, check_id: int, troubles: list[StoreError]) -> bool:
    """Keep the error of a check whose rows are locked. Raises StoreError when more is amiss."""
    try:
        return _look(db, check_id)
    except StoreError as error:
        troubles.append(error)
        if len(troubles) == _TROUBLES_PER_TICK:
            raise
        with db.reader() as session:
            clock.now(session)
        return False


def _look(db: Database, check_id: int) -> bool:
    try:
        done = step.look(db, check_id)
    except StoreError:
        # Nothing is wrong with the check: it is not left alone for an hour.
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this check alone
        step.push_back(db, check_id, error)
        return False
    return done is not None and done.won and done.decision.last is not None
