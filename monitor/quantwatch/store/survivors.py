"""Workers that were cut off and come back: their run was taken for a death, which it was not.

Nobody but the worker itself can tell. Whoever ends a lease sees only that nobody renews it, the
same for a worker that was killed and for one that the database, the network or a suspended host
kept away; so that end counts towards quarantine until the worker says that it lives.
"""

from sqlalchemy import update

from quantwatch.store import clock
from quantwatch.store.endings import hold_still
from quantwatch.store.leases import Claim
from quantwatch.store.quarantine import take_back
from quantwatch.store.session import Database
from quantwatch.store.tables import RunAttemptRow

ALIVE = "WorkerCutOff"
"""Error class of an attempt whose lease ran out although its worker lived."""
_WORDS = "its worker was alive, but could not renew the lease: cut off, or held up"


def note_alive(db: Database, held: Claim) -> bool:
    """Say that the worker of an attempt lived when its lease was ended; False when it wasn't.

    The run's end stays as it is, but it is no death any more: a check that is in quarantine only
    because of it leaves quarantine, audited.
    """
    with db.writer() as session:
        run = hold_still(session, held.run_id)
        if run is None:
            return False
        lost = (
            update(RunAttemptRow)
            .where(RunAttemptRow.run_id == held.run_id, RunAttemptRow.number == held.number)
            .where(RunAttemptRow.outcome == "abandoned", RunAttemptRow.reason_code == "lease_lost")
            .where(RunAttemptRow.error_class.is_(None))
            .values(error_class=ALIVE, message=_WORDS)
            .returning(RunAttemptRow.number)
        )
        if session.execute(lost).first() is None:
            return False
        take_back(session, run.check_id, run.check, clock.now(session))
    return True
