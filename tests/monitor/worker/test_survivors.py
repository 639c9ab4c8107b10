"""Workers that were cut off, and come back: what was taken for their death counts no more."""

import signal
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import select

from quantwatch.store import endings
from quantwatch.store.attempts import Failure, list_attempts
from quantwatch.store.endings import Trouble
from quantwatch.store.leases import Claim
from quantwatch.store.quarantine import lift_quarantine, quarantined_since
from quantwatch.store.reaper import reap
from quantwatch.store.session import Database
from quantwatch.store.survivors import ALIVE, note_alive
from quantwatch.store.tables import AuditRow
from quantwatch.worker import Pace, Worker
from quantwatch.worker.exits import GAVE_UP, NO_DATABASE

Queue = Callable[..., str]
Take = Callable[..., Claim]
DEVICES = ("cpu",)


def lose(db: Database, take: Take) -> tuple[Claim, Trouble]:
    """Let a worker be silent for so long that another host's reaper ends what it holds."""
    held = take()
    db.clock_shift += timedelta(seconds=121)
    (trouble,) = reap(db)
    db.clock_shift += timedelta(minutes=15)
    return held, trouble


def is_apart(db: Database) -> bool:
    with db.reader() as session:
        return quarantined_since(session, "nightly") is not None


def audited(db: Database) -> list[tuple[str, str]]:
    with db.reader() as session:
        rows = session.scalars(select(AuditRow).order_by(AuditRow.id))
        return [(row.actor, row.action) for row in rows]


def test_an_outage_is_told_apart_from_deaths(db: Database, queue: Queue, take: Take) -> None:
    """Catches three outages in a day that set a check apart which did nothing."""
    queue()
    told = []
    for _ in range(3):
        held, trouble = lose(db, take)
        told.append((trouble.quarantined, note_alive(db, held)))
    assert told == [(False, True)] * 3
    assert not is_apart(db)
    attempts = list_attempts(db, held.run_id)
    assert [one.error_class for one in attempts] == [ALIVE] * 3
    assert [one.outcome for one in attempts] == ["abandoned"] * 3
    assert "was alive" in (attempts[0].message or "")


def test_a_quarantine_that_rests_on_it_is_taken_back(
    db: Database, queue: Queue, take: Take
) -> None:
    """Catches a check that stays apart although one of three workers lived; two deaths still count."""
    queue()
    lost = [lose(db, take) for _ in range(3)]
    assert [trouble.quarantined for _, trouble in lost] == [False, False, True]
    assert note_alive(db, lost[0][0])
    assert not is_apart(db)
    assert audited(db) == [("reaper", "quarantined"), ("worker", "quarantine taken back")]
    queue()
    assert lose(db, take)[1].quarantined, "the third death"


def test_four_deaths_of_which_one_was_none(db: Database, queue: Queue, take: Take) -> None:
    """Catches a poisonous check that is let out by one worker that was cut off."""
    queue()
    queue(device="cuda:0")
    beside = take(devices=("cuda:0",), lease_s=36_000)
    lost = [lose(db, take)[0] for _ in range(3)]
    endings.abandon(db, beside, Failure("killed", "killed by SIGKILL"))
    assert note_alive(db, lost[0])
    assert is_apart(db)


def test_a_person_decides_first(db: Database, queue: Queue, take: Take) -> None:
    """Catches a late word that sets a check free which somebody keeps apart, or audits nothing."""
    queue()
    lost = [lose(db, take)[0] for _ in range(3)]
    lift_quarantine(db, "nightly", "ann")
    assert note_alive(db, lost[2])
    assert [action for _, action in audited(db)] == ["quarantined", "quarantine lifted"]


@pytest.mark.parametrize("end", ["not yet", "failed", "killed", "twice"])
def test_what_was_no_lost_lease_is_left_alone(
    db: Database, queue: Queue, take: Take, end: str
) -> None:
    """Catches a real death, or a reason, that is overwritten by a worker that comes late."""
    run_id = queue()
    held = take()
    if end == "failed":
        endings.fail(db, held, Failure("internal", "wrong", "X"))
    elif end == "killed":
        endings.abandon(db, held, Failure("killed", "killed by SIGKILL"))
    elif end == "twice":
        db.clock_shift += timedelta(seconds=121)
        reap(db)
        assert note_alive(db, held)
    before = list_attempts(db, run_id)
    assert not note_alive(db, held)
    assert list_attempts(db, run_id) == before


# the worker says it


class Left:
    """The process of a run that ends with a code after the run was taken away."""

    def __init__(self, db: Database, code: int | None) -> None:
        self._db, self._code = db, code
        self.ended = threading.Event()

    def __call__(self, claim: Claim) -> "Left":
        self._db.clock_shift += timedelta(seconds=121)
        assert [one.run_id for one in reap(self._db)] == [claim.run_id]
        if self._code is not None:
            self.ended.set()
        return self

    def kill(self) -> None:
        self.ended.set()

    def code(self) -> int:
        return -signal.SIGKILL if self._code is None else self._code


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        pytest.param(GAVE_UP, False, id="gave up: lease lost"),
        pytest.param(NO_DATABASE, False, id="no database"),
        pytest.param(0, False, id="ended by itself"),
        pytest.param(None, False, id="still measuring: killed by the worker"),
        pytest.param(-signal.SIGTERM, False, id="stopped with the service"),
        pytest.param(-signal.SIGKILL, True, id="killed"),
        pytest.param(-signal.SIGSEGV, True, id="crashed"),
    ],
)
def test_a_worker_that_lives_says_so(
    db: Database, queue: Queue, code: int | None, counts: bool
) -> None:
    """Catches an outage that counts as a death, and a death that hides in an outage."""
    run_id = queue()
    pace = Pace(look_s=0.01, kill_after_s=0.0)
    assert Worker(db, Left(db, code), devices=DEVICES, pace=pace).run_once()
    (attempt,) = list_attempts(db, run_id)
    assert attempt.outcome == "abandoned"
    assert attempt.reason_code == "lease_lost"
    assert attempt.error_class == (None if counts else ALIVE)


def test_three_outages_under_a_worker(db: Database, queue: Queue) -> None:
    """Catches a nightly check that is apart after three restarts of the database server."""
    queue()
    for _ in range(3):
        worker = Worker(db, Left(db, GAVE_UP), devices=DEVICES, pace=Pace(look_s=0.01))
        assert worker.run_once()
        db.clock_shift += timedelta(minutes=15)
    assert not is_apart(db)
