"""Failed operations are counted, reopened, closed and never multiplied."""

from datetime import timedelta
from threading import Thread

import pytest

from quantwatch.errors import UserError
from quantwatch.store.failed_tasks import (
    MAX_MESSAGE,
    count_by,
    list_failed,
    note_failure,
    resolve,
)
from quantwatch.store.session import Database


def _note(db: Database, operation: str, error: str, subject: str, message: str = "no") -> None:
    with db.writer() as session:
        note_failure(session, operation, error, subject, message)


def test_repeated_failures_are_one_row(db: Database) -> None:
    """Catches a table that grows with every retry, or one that loses when it all began."""
    _note(db, "deliver", "http_500", "ops", "first")
    db.clock_shift = timedelta(hours=2)
    _note(db, "deliver", "http_500", "ops", "second")
    [task] = list_failed(db)
    assert (task.attempts, task.message, task.resolved_at) == (2, "second", None)
    assert timedelta(hours=2) <= task.last_at - task.first_at < timedelta(hours=2, minutes=1)


def test_a_resolved_task_opens_again(db: Database) -> None:
    """Catches a second outage that stays hidden behind the first one's end."""
    _note(db, "deliver", "http_500", "ops")
    _note(db, "deliver", "timeout", "ops")
    _note(db, "deliver", "timeout", "chat")
    with db.writer() as session:
        assert resolve(session, "deliver", "ops") == 2
        assert resolve(session, "deliver", "ops") == 0
    assert [task.subject for task in list_failed(db)] == ["chat"]
    assert len(list_failed(db, include_resolved=True)) == 3
    _note(db, "deliver", "timeout", "ops")
    assert [(task.subject, task.attempts) for task in list_failed(db)] == [("ops", 2), ("chat", 1)]


def test_counts_by_operation_and_by_error(db: Database) -> None:
    """Catches counts of rows where attempts are meant, and resolved failures that vanish."""
    for operation, error, subject in [
        ("deliver", "timeout", "ops"),
        ("deliver", "timeout", "ops"),
        ("deliver", "http_500", "chat"),
        ("run", "timeout", "nightly"),
    ]:
        _note(db, operation, error, subject)
    with db.writer() as session:
        resolve(session, "deliver", "chat")
    counted = [(c.name, c.num_tasks, c.num_open, c.num_attempts) for c in count_by(db, "operation")]
    assert counted == [("deliver", 2, 1, 3), ("run", 1, 1, 1)]
    counted = [(c.name, c.num_tasks, c.num_open, c.num_attempts) for c in count_by(db, "error")]
    assert counted == [("timeout", 2, 2, 3), ("http_500", 1, 0, 1)]
    [first] = [c for c in count_by(db, "operation") if c.name == "run"]
    assert first.first_at.tzinfo is not None
    with pytest.raises(UserError, match="operation, error"):
        count_by(db, "subject")  # type: ignore[arg-type]


def test_filters_and_limit(db: Database) -> None:
    """Catches a filter that is ignored, and an endless list."""
    for index in range(5):
        _note(db, "deliver", f"http_{index}", "ops")
    _note(db, "run", "http_1", "nightly")
    assert [task.operation for task in list_failed(db, operation="run")] == ["run"]
    assert len(list_failed(db, error_code="http_1")) == 2
    assert len(list_failed(db, limit=2)) == 2


def test_long_and_odd_messages_are_kept_readable(db: Database) -> None:
    """Catches a receiver's whole page in the table, and NUL bytes that PostgreSQL refuses."""
    _note(db, "deliver", "http_500", "ops", "\0" + "x" * 5000)
    [task] = list_failed(db)
    assert task.message.startswith("\\x00xx")
    assert task.message.endswith("x…")
    assert len(task.message) < MAX_MESSAGE + 10


def test_a_rolled_back_transaction_leaves_no_trace(db: Database) -> None:
    """Catches a failure noted for work that was undone together with it."""

    def note_and_fail() -> None:
        with db.writer() as session:
            note_failure(session, "run", "oom", "nightly", "no memory")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        note_and_fail()
    assert list_failed(db) == []


def test_writers_at_once_lose_no_attempt(db: Database) -> None:
    """Catches counting by reading first and writing later."""

    def work() -> None:
        for _ in range(10):
            _note(db, "deliver", "timeout", "ops")

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [task] = list_failed(db)
    assert task.attempts == 40
