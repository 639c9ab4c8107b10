"""How attempts end, and what run, device and check remember of it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from quantwatch.domain import RunResult, RunStatus, Suite
from quantwatch.errors import UserError
from quantwatch.store import endings
from quantwatch.store.attempts import Failure, list_attempts
from quantwatch.store.cancelling import request_cancel
from quantwatch.store.endings import Trouble
from quantwatch.store.failed_tasks import list_failed
from quantwatch.store.leases import Claim
from quantwatch.store.runs import end_run, finish_run, latest_by_check
from quantwatch.store.session import Database
from quantwatch.store.tables import AuditRow, CheckRow, DeviceSlotRow

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
Make = Callable[..., RunResult]

LOCKED = Failure("storage_error", "database is locked", "StoreError", retryable=True)
WRONG = Failure("config_invalid", "no such rule", "ConfigError")
LATE = Failure("deadline", "too slow")


def slots(db: Database) -> int:
    with db.reader() as session:
        return session.scalar(select(func.count()).select_from(DeviceSlotRow)) or 0


def check_row(db: Database) -> tuple[int, Any]:
    with db.reader() as session:
        row = session.scalars(select(CheckRow).where(CheckRow.name == "nightly")).one()
        return row.unhealthy_runs, row.last_success_at


def test_trouble_of_the_monitor_is_tried_again(
    db: Database, queue: Queue, take: Take, peek: Peek
) -> None:
    """Catches a locked database that ends a night, or is judged (B09, X9)."""
    run_id = queue()
    trouble = endings.fail(db, take(to="finalizing"), LOCKED)

    assert trouble == Trouble(
        run_id, "nightly", RunStatus.QUEUED, "storage_error", LOCKED.message, 0
    )
    names = "status", "verdict", "reason_code", "attempt"
    assert peek(run_id, *names) == (RunStatus.QUEUED, None, None, 1)
    assert slots(db) == 0
    (attempt,) = list_attempts(db, run_id)
    assert (attempt.outcome, attempt.reason_code, attempt.error_class, attempt.message) == (
        "failed",
        "storage_error",
        "StoreError",
        "database is locked",
    )
    (task,) = list_failed(db)
    assert (task.operation, task.error_code, task.subject) == ("run", "storage_error", "nightly")


def test_the_last_attempt_fails_the_run(db: Database, queue: Queue, take: Take, peek: Peek) -> None:
    """Catches a run that is retried for ever."""
    run_id = queue(max_attempts=2)
    endings.fail(db, take(), LOCKED)
    db.clock_shift = timedelta(minutes=1)
    trouble = endings.fail(db, take(), LOCKED)

    assert (trouble.status, trouble.unhealthy_runs) == (RunStatus.FAILED, 1)
    names = "status", "verdict", "reason_code", "reason_text", "lease_token"
    expected = (RunStatus.FAILED, None, "storage_error", "database is locked", None)
    assert peek(run_id, *names) == expected
    assert peek(run_id, "finished_at") is not None
    assert [run.run_id for run in latest_by_check(db)] == [run_id]


def test_what_stays_wrong_is_not_tried_again(db: Database, queue: Queue, take: Take) -> None:
    """Catches two more hours for a typing error."""
    queue()
    assert endings.fail(db, take(), WRONG).status is RunStatus.FAILED


def test_a_released_run_has_lost_nothing(
    db: Database, queue: Queue, take: Take, peek: Peek
) -> None:
    """Catches a deploy that uses up an attempt, or a run that waits after it."""
    run_id = queue()
    released = endings.release(db, take())

    assert released.status is RunStatus.QUEUED
    assert peek(run_id, "attempt") == 0
    assert slots(db) == 0
    again = take("w2")
    assert (again.run_id, again.attempt, again.number) == (run_id, 1, 2)
    endings.fail(db, again, LOCKED)
    assert [(a.number, a.outcome) for a in list_attempts(db, run_id)] == [
        (1, "released"),
        (2, "failed"),
    ]
    assert [task.attempts for task in list_failed(db)] == [1], "a release is no failure"


def test_a_run_past_its_deadline_is_not_tried_again(db: Database, queue: Queue, take: Take) -> None:
    """Catches a hung run that hangs two more times."""
    run_id = queue()
    assert endings.time_out(db, take(), LATE).status is RunStatus.TIMED_OUT
    assert [attempt.outcome for attempt in list_attempts(db, run_id)] == ["timed_out"]
    assert check_row(db)[0] == 1


def test_a_success_makes_a_check_well_again(
    db: Database, queue: Queue, take: Take, make_result: Make, suite: Suite
) -> None:
    """Catches a health alert that never ends, a dead man's alert in spite of a success (X8)."""
    for expected in (1, 2):
        queue()
        endings.fail(db, take(), WRONG)
        assert check_row(db) == (expected, None)
    run_id = queue()
    claim = take(to="finalizing")
    result = make_result(run_id=run_id)
    finish_run(db, result, suite, (), lease=claim.token)

    assert check_row(db) == (0, result.finished_at)
    assert list_failed(db) == []
    assert slots(db) == 0
    (attempt,) = list_attempts(db, run_id)
    assert (attempt.outcome, attempt.reason_code) == ("succeeded", None)


def test_an_imported_old_run_is_no_news(
    db: Database, queue: Queue, take: Take, make_result: Make, suite: Suite
) -> None:
    """Catches a baseline from last year that silences the dead man's alert, or makes well."""
    new = make_result(run_id=queue())
    finish_run(db, new, suite, (), lease=take(to="finalizing").token)
    queue()
    endings.fail(db, take(), WRONG)
    old = make_result(days=-300, run_id=queue())
    finish_run(db, old, suite, (), lease=take(to="finalizing").token)

    assert check_row(db) == (1, new.finished_at)


def test_a_waiting_run_is_cancelled_at_once(
    db: Database, queue: Queue, take: Take, peek: Peek
) -> None:
    """Catches a cancelled run that is claimed all the same (X13)."""
    run_id = queue()
    assert request_cancel(db, run_id, actor="ann", reason="not tonight") is RunStatus.CANCELLED

    names = "status", "reason_code", "reason_text", "verdict"
    expected = (RunStatus.CANCELLED, "user", "cancelled by ann: not tonight", None)
    assert peek(run_id, *names) == expected
    assert peek(run_id, "finished_at") is not None
    with pytest.raises(AssertionError):
        take()
    with db.reader() as session:
        (row,) = session.scalars(select(AuditRow)).all()
        assert (row.actor, row.action, row.subject, row.after) == (
            "ann",
            "cancelled",
            f"run {run_id}",
            {"reason": "not tonight"},
        )
    with pytest.raises(UserError, match="cancelled already"):
        request_cancel(db, run_id, actor="bob", reason="me too")
    with pytest.raises(UserError, match="There is no run"):
        request_cancel(db, "01J", actor="bob", reason="x")


def test_an_active_run_is_asked_to_stop_once(
    db: Database, queue: Queue, take: Take, peek: Peek
) -> None:
    """Catches a second person whose words replace the first one's."""
    run_id = queue()
    claim = take()
    assert request_cancel(db, run_id, actor="ann", reason="a") is RunStatus.CLAIMED
    assert request_cancel(db, run_id, actor="bob", reason="b") is RunStatus.CLAIMED
    assert endings.fail(db, claim, LOCKED).status is RunStatus.CANCELLED, "no retry for nobody"

    assert peek(run_id, "reason_text") == "cancelled by ann: a"
    assert [attempt.outcome for attempt in list_attempts(db, run_id)] == ["cancelled"]
    assert check_row(db) == (0, None)
    assert latest_by_check(db) == []


@pytest.mark.parametrize("ending", ["release", "time_out"])
def test_a_cancelled_run_is_never_given_back(
    db: Database, queue: Queue, take: Take, ending: str
) -> None:
    """Catches a shutdown that brings a cancelled run back to life."""
    run_id = queue()
    claim = take()
    request_cancel(db, run_id, actor="ann", reason="a")
    if ending == "release":
        assert endings.release(db, claim).status is RunStatus.CANCELLED
    else:
        assert endings.time_out(db, claim, LATE).status is RunStatus.TIMED_OUT


@pytest.mark.slow
def test_a_run_ended_by_hand_keeps_no_device(db: Database, queue: Queue, take: Take) -> None:
    """Catches a slot that stays taken for ever."""
    run_id = queue()
    take()
    end_run(db, run_id, RunStatus.FAILED, "by hand")
    assert slots(db) == 0
    assert [attempt.outcome for attempt in list_attempts(db, run_id)] == ["failed"]


def test_an_unknown_reason_is_refused() -> None:
    """Catches a reason code outside of the closed list."""
    with pytest.raises(ValueError, match="'bad luck' is none of oom"):
        Failure("bad luck", "x")
