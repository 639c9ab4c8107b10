"""In which order transactions take locks on PostgreSQL, so that nobody waits in a ring.

1. the configuration (`applied.keep_others_out`), for whoever applies one;
2. the check's row (`endings.hold_still`, `runs.finish_run`, `watched.hold_check`), one check in a
   transaction, or all by name for whoever applies a configuration;
3. the run's row, its attempts, its devices (in one order, `slots.take`), failed tasks, alerts;
4. the outbox (`hold_outbox`): one lock for everything in `event`, `delivery` and `endpoint`.

Whoever writes to the outbox holds it whole. A run's end publishes on several subjects to several
endpoints, an attempt ends a digest's members of any subject and tells other endpoints, a digest
takes what another writer may be suppressing: with a lock per row no order serves all of them. It
is held for milliseconds, never while a message is sent, and endpoints take a few messages a minute.

A delivery's failed tasks come after the outbox: nobody else writes those rows. Retention leaves
out what is locked. Where PostgreSQL ends a transaction all the same (40P01, 40001), `again` repeats
the costly ones; all others are done again by the loop that they belong to. SQLite has one writer at
a time.
"""

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import text
from sqlalchemy.orm import Session

from quantwatch.errors import ConflictError
from quantwatch.observability import logs

T = TypeVar("T")
MOST_TRIES = 5
log = logs.get(__name__)
_OUTBOX_LOCK = 0x6F7574626F78  # "outbox": any number, the same in every process


def hold_outbox(session: Session) -> None:
    """Let nobody else write events, deliveries or endpoints until the commit.

    What is read from here on is the newest. Holding it twice is holding it.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _OUTBOX_LOCK})


def again(write: Callable[[], T]) -> T:
    """Return what a whole transaction returns, repeated when the database ended it for another one.

    For what would be costly to do over: a run's results, what came of a message that was sent.
    Raises ConflictError after five tries, and whatever else the transaction raises at once.
    """
    for number in range(1, MOST_TRIES):
        try:
            return write()
        except ConflictError as error:
            log.warning("transaction is repeated", tries=number, why=str(error))
    return write()
