"""Runs whose workers are gone: never active for longer than a lease and two rounds of the reaper."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from quantwatch.domain import RunResult, RunStatus, Suite
from quantwatch.errors import UserError
from quantwatch.store import endings
from quantwatch.store.attempts import Failure, list_attempts
from quantwatch.store.cancelling import request_cancel
from quantwatch.store.endings import Trouble
from quantwatch.store.failed_tasks import list_failed
from quantwatch.store.leases import Claim
from quantwatch.store.quarantine import lift_quarantine, quarantined_since
from quantwatch.store.reaper import reap
from quantwatch.store.runs import begin_run, finish_run, latest_by_check
from quantwatch.store.session import Database
from quantwatch.store.tables import AuditRow, CheckRow, DeviceSlotRow, RunRow

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
Make = Callable[..., RunResult]


def wait(db: Database, **length: float) -> None:
    db.clock_shift += timedelta(**length)


def slots(db: Database) -> int:
    with db.reader() as session:
        return session.scalar(select(func.count()).select_from(DeviceSlotRow)) or 0


def unhealthy(db: Database, check: str = "nightly") -> int | None:
    with db.reader() as session:
        return session.scalar(select(CheckRow.unhealthy_runs).where(CheckRow.name == check))


def is_apart(db: Database, check: str = "nightly") -> bool:
    with db.reader() as session:
        return quarantined_since(session, check) is not None


@pytest.mark.parametrize("to", ["claimed", "preparing", "measuring", "finalizing"])
def test_a_lost_run_is_queued_again(
    db: Database, queue: Queue, take: Take, peek: Peek, to: str
) -> None:
    """Catches a run that is shown as running for weeks after kill -9 (B39, X10)."""
    run_id = queue()
    take(to=to)
    wait(db, seconds=119)
    assert reap(db) == []
    assert slots(db) == 1
    wait(db, seconds=2)

    (trouble,) = reap(db)

    assert (run_id, "nightly", RunStatus.QUEUED, "lease_lost", 0, False) == (
        trouble.run_id,
        trouble.check,
        trouble.status,
        trouble.reason_code,
        trouble.unhealthy_runs,
        trouble.quarantined,
    )
    names = "status", "attempt", "lease_token", "lease_until", "deadline_at", "verdict", "stage"
    assert peek(run_id, *names) == (RunStatus.QUEUED, 1, None, None, None, None, None)
    assert slots(db) == 0
    assert reap(db) == []
    (attempt,) = list_attempts(db, run_id)
    assert (attempt.outcome, attempt.reason_code, attempt.error_class) == (
        "abandoned",
        "lease_lost",
        None,
    )
    assert attempt.ended_at is not None


def test_the_next_attempt_waits_longer_each_time(
    db: Database, queue: Queue, take: Take, peek: Peek
) -> None:
    """Catches a retry at once, and one that never comes (1, 5 minutes; then abandoned)."""
    run_id = queue()
    for minutes in (1, 5):
        take()
        wait(db, seconds=121)
        assert [trouble.status for trouble in reap(db)] == [RunStatus.QUEUED]
        ended = list_attempts(db, run_id)[-1].ended_at
        assert ended is not None
        assert peek(run_id, "not_before") == ended + timedelta(minutes=minutes)
        wait(db, seconds=60 * minutes - 30)  # a busy machine takes its own time, too
        with pytest.raises(AssertionError):
            take()
        wait(db, seconds=30)
    take()
    wait(db, seconds=121)

    (trouble,) = reap(db)

    assert (trouble.status, trouble.unhealthy_runs) == (RunStatus.ABANDONED, 1)
    assert [attempt.outcome for attempt in list_attempts(db, run_id)] == ["abandoned"] * 3
    assert [run.run_id for run in latest_by_check(db)] == [run_id]
    wait(db, days=9)
    assert reap(db) == []


def test_an_overdue_run_is_timed_out_when_its_worker_sleeps(
    db: Database, queue: Queue, take: Take, peek: Peek
) -> None:
    """Catches a hung run whose heartbeat goes on for ever (F5)."""
    run_id = queue(deadline_s=600.0)
    take(lease_s=3600)
    wait(db, seconds=655)
    assert reap(db) == [], "its worker has a minute to end it itself"
    wait(db, seconds=10)

    (trouble,) = reap(db)

    assert (trouble.status, trouble.reason_code) == (RunStatus.TIMED_OUT, "deadline")
    assert unhealthy(db) == 1
    assert slots(db) == 0
    assert peek(run_id, "verdict") is None


@pytest.mark.parametrize(
    ("lease_s", "later"),
    [pytest.param(120, 121, id="worker-gone"), pytest.param(3600, 61, id="worker-hangs")],
)
def test_a_cancelled_run_ends_without_its_worker(
    db: Database, queue: Queue, take: Take, peek: Peek, lease_s: float, later: float
) -> None:
    """Catches a cancelled run that is retried, or stays active because nobody heeds it (X13)."""
    run_id = queue()
    take(lease_s=lease_s)
    request_cancel(db, run_id, actor="ann", reason="wrong model")
    assert reap(db) == []
    wait(db, seconds=later)

    (trouble,) = reap(db)

    assert trouble.status is RunStatus.CANCELLED
    names = "status", "reason_code", "reason_text"
    assert peek(run_id, *names) == (RunStatus.CANCELLED, "user", "cancelled by ann: wrong model")
    assert unhealthy(db) == 0, "a cancelled run is nobody's fault"
    assert list_failed(db) == []


def test_a_killed_command_is_ended_as_well(
    db: Database, make_result: Make, peek: Peek, suite: Suite
) -> None:
    """Catches a run begun by hand that stays `preparing` after kill -9."""
    result = make_result()
    begin_run(db, run_id=result.run_id, check="nightly", config={}, started_at=result.started_at)
    assert reap(db) == []
    wait(db, seconds=121)

    (trouble,) = reap(db)

    assert (trouble.run_id, trouble.status) == (result.run_id, RunStatus.ABANDONED)
    assert [attempt.outcome for attempt in list_attempts(db, result.run_id)] == ["abandoned"]


def test_a_run_of_an_older_program_is_ended(db: Database, make_result: Make, peek: Peek) -> None:
    """Catches rows without a lease, left over from before there were any."""
    result = make_result()
    begin_run(db, run_id=result.run_id, check="nightly", config={}, started_at=result.started_at)
    with db.writer() as session:
        session.execute(update(RunRow).values(lease_token=None, lease_until=None, max_attempts=1))
    # The row began on 2026-11-29 02:00, which is the past.
    db.clock_shift = timedelta(days=1)

    assert [trouble.status for trouble in reap(db)] == [RunStatus.ABANDONED]


def test_a_finished_run_is_left_alone(
    db: Database, queue: Queue, take: Take, make_result: Make, suite: Suite, peek: Peek
) -> None:
    """Catches a success that is taken back."""
    run_id = queue()
    claim = take(to="finalizing")
    finish_run(db, make_result(run_id=run_id), suite, (), lease=claim.token)
    wait(db, days=1)

    assert reap(db) == []
    assert peek(run_id, "status") == RunStatus.SUCCEEDED


def test_several_reapers_end_a_run_once(db: Database, queue: Queue, take: Take) -> None:
    """Catches an attempt that is counted twice, two messages about one loss."""
    wanted = {queue(device=device) for device in ("cpu", "cuda:0", "cuda:1")}
    for device in ("cpu", "cuda:0", "cuda:1"):
        take(devices=(device,))
    wait(db, seconds=121)
    together, told = threading.Barrier(4), []

    def one(_: int) -> list[Trouble]:
        together.wait()
        return reap(db, lambda _, trouble: told.append(trouble.run_id))

    with ThreadPoolExecutor(4) as pool:
        found = [trouble.run_id for each in pool.map(one, range(4)) for trouble in each]
    assert sorted(found) == sorted(wanted)
    assert sorted(told) == sorted(wanted)


def test_what_is_told_belongs_to_the_end(
    db: Database, queue: Queue, take: Take, peek: Peek, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an end without its alert, and one check without its end that costs others theirs."""
    run_id, other = queue(), queue("other", device="mps")
    take()
    take(devices=("mps",))
    wait(db, seconds=121)

    def refuse(_: object, trouble: Trouble) -> None:
        if trouble.run_id == run_id:
            raise UserError("no receiver")

    assert [other] == [trouble.run_id for trouble in reap(db, refuse)]
    assert "a run can't be ended" in caplog.text
    assert peek(run_id, "status") == RunStatus.CLAIMED
    assert [run_id] == [trouble.run_id for trouble in reap(db)]


def die(db: Database, take: Take) -> Trouble:
    take()
    wait(db, seconds=121)
    (trouble,) = reap(db)
    wait(db, minutes=15)
    return trouble


def test_a_check_that_kills_its_worker_is_set_apart(db: Database, queue: Queue, take: Take) -> None:
    """Catches a poison run that takes the service down night after night (§6.4, 6)."""
    queue()
    told: list[bool] = [die(db, take).quarantined for _ in range(3)]

    assert told == [False, False, True]
    assert is_apart(db)
    with db.reader() as session:
        audit = session.scalars(select(AuditRow)).all()
        assert [(row.actor, row.action, row.subject) for row in audit] == [
            ("reaper", "quarantined", "check nightly")
        ]
    queue()
    with pytest.raises(AssertionError):
        take()


def test_a_lifted_quarantine_forgets_what_was(db: Database, queue: Queue, take: Take) -> None:
    """Catches a check that is set apart again by its first hiccup after the repair."""
    queue()
    for _ in range(3):
        die(db, take)
    lift_quarantine(db, "nightly", "ann")
    assert not is_apart(db)
    queue()

    assert [die(db, take).quarantined for _ in range(3)] == [False, False, True]
    with pytest.raises(UserError, match="not in quarantine"):
        lift_quarantine(db, "another", "ann")


def test_deaths_of_another_day_are_forgotten(db: Database, queue: Queue, take: Take) -> None:
    """Catches a check that is set apart for three accidents in a year."""
    queue()
    for _ in range(2):
        die(db, take)
    wait(db, hours=24)

    assert not die(db, take).quarantined


def test_errors_are_no_deaths(db: Database, queue: Queue, take: Take) -> None:
    """Catches a check without weights that is set apart as if it had killed anybody."""
    for _ in range(4):
        queue()
        endings.fail(db, take(), Failure("weights_missing", "gone", "ModelError"))
    assert not is_apart(db)
    assert unhealthy(db) == 4


def test_a_person_who_kills_a_command_harms_no_check(db: Database, make_result: Make) -> None:
    """Catches three impatient kill -9 that switch the nightly check off."""
    for _ in range(4):
        made = make_result()
        begin_run(db, run_id=made.run_id, check="nightly", config={}, started_at=made.started_at)
    wait(db, seconds=121)

    assert [trouble.status for trouble in reap(db)] == [RunStatus.ABANDONED] * 4
    assert not is_apart(db)
