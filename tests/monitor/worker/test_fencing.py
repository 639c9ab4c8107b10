"""Every write of a worker carries its token: who lost its run can't touch it any more."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from quantwatch.domain import Block, RunEvent, RunResult, RunStatus, Suite
from quantwatch.errors import LeaseLostError, RunStoppedError, StoreError
from quantwatch.store import endings, leases
from quantwatch.store.attempts import Failure
from quantwatch.store.cancelling import request_cancel
from quantwatch.store.leases import Claim, Report
from quantwatch.store.reaper import reap
from quantwatch.store.runs import finish_run, get_result
from quantwatch.store.session import Database
from quantwatch.store.tables import Base

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
Make = Callable[..., RunResult]

OOM = Failure("oom", "no memory", "MemoryError", retryable=True)


def snapshot(db: Database) -> dict[str, list[Any]]:
    """Every row of every table but what a heartbeat may change anyway."""
    with db.reader() as session:
        return {
            name: sorted(map(repr, session.execute(select(table)).all()))
            for name, table in Base.metadata.tables.items()
        }


LATE: dict[str, Callable[[Database, Claim, RunResult, Suite], object]] = {
    "heartbeat": lambda db, claim, *_: leases.heartbeat(db, claim, Report("measure", 5, 10)),
    "advance": lambda db, claim, *_: leases.advance(db, claim, RunEvent.FINALIZE),
    "fail": lambda db, claim, *_: endings.fail(db, claim, OOM),
    "release": lambda db, claim, *_: endings.release(db, claim),
    "time-out": lambda db, claim, *_: endings.time_out(db, claim, OOM),
    "cancel": lambda db, claim, *_: endings.cancel(db, claim, OOM),
    "abandon": lambda db, claim, *_: endings.abandon(db, claim, OOM),
    "look": lambda db, claim, *_: leases.standing(db, claim),
    "finish": lambda db, claim, result, suite: finish_run(db, result, suite, (), lease=claim.token),
}


@pytest.mark.parametrize("write", LATE.values(), ids=LATE)
@pytest.mark.parametrize("taken_by", ["nobody", "another"])
def test_a_late_worker_changes_nothing(
    db: Database,
    queue: Queue,
    take: Take,
    *,
    make_result: Make,
    suite: Suite,
    taken_by: str,
    write: Callable[..., object],
) -> None:
    """Catches a slow worker that ends, or overwrites, what another one does by now (B39)."""
    run_id = queue()
    late = take("late", to="measuring")
    db.clock_shift = timedelta(seconds=121)
    assert [run_id] == [trouble.run_id for trouble in reap(db)]
    if taken_by == "another":
        db.clock_shift = timedelta(minutes=4)
        assert run_id == take("prompt", to="finalizing").run_id
    before = snapshot(db)

    with pytest.raises(LeaseLostError):
        write(db, late, make_result(run_id=run_id), suite)
    assert before == snapshot(db)


def test_the_worker_in_time_is_not_disturbed(
    db: Database,
    queue: Queue,
    take: Take,
    make_result: Make,
    suite: Suite,
    token_blocks: tuple[Block, ...],
) -> None:
    """Catches results of two attempts in one run."""
    run_id = queue()
    late = take("late", to="finalizing")
    db.clock_shift = timedelta(minutes=4)
    reap(db)
    db.clock_shift = timedelta(minutes=6)
    prompt = take("prompt", to="finalizing")
    result = make_result(run_id=run_id)
    with pytest.raises(LeaseLostError, match="dropped"):
        finish_run(db, make_result(run_id=run_id), suite, token_blocks, lease=late.token)
    finish_run(db, result, suite, token_blocks, lease=prompt.token)

    assert get_result(db, run_id) == result
    with pytest.raises(LeaseLostError):
        endings.fail(db, late, OOM)


def test_a_heartbeat_after_the_end_of_the_lease_comes_too_late(
    db: Database, queue: Queue, take: Take, peek: Peek
) -> None:
    """Catches a lease that is renewed after anybody might have taken the run."""
    run_id = queue()
    claim = take()
    db.clock_shift = timedelta(seconds=119)
    leases.heartbeat(db, claim, Report("measure", 5, 10))
    assert peek(run_id, "stage", "tokens_done", "tokens_total") == ("measure", 5, 10)
    db.clock_shift = timedelta(seconds=119 + 121)

    with pytest.raises(LeaseLostError):
        leases.heartbeat(db, claim, Report())
    assert reap(db)[0].run_id == run_id


def test_a_held_run_is_finished_from_finalizing_only(
    db: Database, queue: Queue, take: Take, make_result: Make, suite: Suite
) -> None:
    """Catches results of a run that had not been measured to the end (X11)."""
    run_id = queue()
    claim = take(to="measuring")
    with pytest.raises(StoreError, match="measuring; a held run is finished from finalizing"):
        finish_run(db, make_result(run_id=run_id), suite, (), lease=claim.token)
    with pytest.raises(LeaseLostError):
        leases.advance(db, claim, RunEvent.PREPARE)


def test_a_cancelled_run_never_succeeds(
    db: Database, queue: Queue, take: Take, make_result: Make, suite: Suite, peek: Peek
) -> None:
    """Catches results, and an alert, of a run that somebody was told is cancelled (X13)."""
    run_id = queue()
    claim = take(to="finalizing")
    assert request_cancel(db, run_id, actor="ann", reason="wrong model") is RunStatus.FINALIZING

    with pytest.raises(RunStoppedError, match="cancelled by ann: wrong model") as stopped:
        finish_run(db, make_result(run_id=run_id), suite, (), lease=claim.token)
    assert stopped.value.reason_code == "user"
    assert peek(run_id, "status") == RunStatus.FINALIZING
    with db.reader() as session:
        assert (
            session.scalar(select(func.count()).select_from(Base.metadata.tables["measurement"]))
            == 0
        )
