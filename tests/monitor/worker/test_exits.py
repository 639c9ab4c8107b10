"""What the end of a run's process means: the check's doing, or trouble around it."""

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from quantwatch.domain import RunEvent, RunStatus
from quantwatch.errors import StoreError, UserError
from quantwatch.store import components, leases
from quantwatch.store.attempts import Failure, list_attempts
from quantwatch.store.endings import Trouble, fail
from quantwatch.store.leases import Claim, Report
from quantwatch.store.quarantine import quarantined_since
from quantwatch.store.session import Database
from quantwatch.worker import Pace, Worker, child, exits
from quantwatch.worker.execution import Child
from quantwatch.worker.patience import insist

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
SOON_S = 30.0

# A process that is as far as it gets before a run is looked for.
STAYING = """
import sys, threading
from pathlib import Path
from quantwatch.worker import child
def stay(*_):
    Path(sys.argv[1]).touch()
    threading.Event().wait()
child._exit_code = stay
child.main()
"""


class Over:
    """A process that left with a code and wrote nothing."""

    def __init__(self, code: int) -> None:
        self._code, self.ended = code, threading.Event()
        self.ended.set()

    def __call__(self, _: Claim) -> "Over":
        return self

    def kill(self) -> None:
        raise AssertionError("it is over")

    def code(self) -> int:
        return self._code


def is_apart(db: Database) -> bool:
    with db.reader() as session:
        return quarantined_since(session, "nightly") is not None


@pytest.mark.parametrize(
    ("code", "outcome", "reason", "kind", "apart"),
    [
        pytest.param(-signal.SIGKILL, "abandoned", "killed", None, True, id="out-of-memory"),
        pytest.param(-signal.SIGSEGV, "abandoned", "killed", None, True, id="crash"),
        pytest.param(-signal.SIGTERM, "failed", "killed", "Stopped", False, id="stopped"),
        pytest.param(1, "failed", "internal", "ChildStartup", False, id="traceback"),
        pytest.param(0, "failed", "internal", "ChildStartup", False, id="without-an-end"),
        pytest.param(74, "failed", "storage_error", "StoreError", False, id="no-database"),
        pytest.param(76, "failed", "lease_lost", "LeaseLostError", False, id="gave-up"),
    ],
)
def test_only_deaths_of_its_own_set_a_check_apart(
    db: Database, queue: Queue, *, code: int, outcome: str, reason: str, kind: str | None,
    apart: bool,
) -> None:  # fmt: skip
    """Catches six minutes without a database that put every check into quarantine."""
    run_id = queue()
    for _ in range(3):
        assert Worker(db, Over(code)).run_once()
        db.clock_shift += timedelta(minutes=15)

    attempts = list_attempts(db, run_id)
    assert [(a.outcome, a.reason_code, a.error_class) for a in attempts] == [
        (outcome, reason, kind)
    ] * 3
    assert is_apart(db) is apart


# the process itself


def job_of(db: Database, claim: Claim, **other: Any) -> dict[str, Any]:
    job = {
        "database": db.url,
        "run_id": claim.run_id,
        "token": claim.token,
        "lease_s": claim.lease_s,
        "cache_dir": "/nowhere",
        "roots": [],
        "service": {"schema_version": 1},
    }
    return job | other


def exit_code(job: dict[str, Any]) -> int:
    with ExitStack() as stack:
        return child._exit_code(job, stack)


def test_a_database_that_is_away_at_the_start(
    db: Database, queue: Queue, take: Take, tmp_path: Path
) -> None:
    """Catches a traceback that counts as a death."""
    queue()
    gone = job_of(db, take(), database=f"sqlite:///{tmp_path}/gone.db")
    assert exit_code(gone) == exits.NO_DATABASE


def test_a_run_that_was_taken_away_at_the_start(db: Database, queue: Queue, take: Take) -> None:
    """Catches a process that says that it has written an end."""
    queue()
    assert exit_code(job_of(db, take(), token="another")) == exits.GAVE_UP


def test_an_installation_that_is_broken(
    db: Database, queue: Queue, take: Take, peek: Peek, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a package that is being upgraded, and every check that is due in quarantine."""
    run_id = queue()
    monkeypatch.setitem(sys.modules, "quantwatch.worker.performing", None)
    assert exit_code(job_of(db, take())) == 0

    (attempt,) = list_attempts(db, run_id)
    assert (attempt.outcome, attempt.reason_code) == ("failed", "internal")
    assert attempt.error_class == "ModuleNotFoundError"
    assert str(attempt.message).startswith("its process could not begin: ModuleNotFoundError")
    assert peek(run_id, "status") == RunStatus.QUEUED


def test_a_slow_start_is_no_lost_worker(
    db: Database, queue: Queue, take: Take, peek: Peek, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an import of torch that outlasts the lease, which was never renewed before it."""
    run_id = queue()
    claim, before = take(), peek(run_id, "lease_until")
    db.clock_shift = timedelta(seconds=100)
    monkeypatch.setattr("quantwatch.worker.performing.perform", lambda *_: True)
    assert exit_code(job_of(db, claim)) == 0
    # The process has its own clock, which nobody moved: that it wrote at all is what counts.
    assert peek(run_id, "lease_until") > before


@pytest.mark.parametrize("size", [10, 66_000, 70_000, 1_000_000])
def test_a_process_that_dies_before_it_reads_its_job(size: int) -> None:
    """Catches a worker that waits for ever for a process that is dead."""
    dead = Child([sys.executable, "-S", "-c", "pass"], {"config": "x" * size})
    assert dead.ended.wait(SOON_S)
    assert dead.code() == 0


def test_a_process_that_reads_nothing_can_be_killed() -> None:
    """Catches a worker that hangs in its write to a process that hangs."""
    idle = "import threading; threading.Event().wait()"
    hung = Child([sys.executable, "-S", "-c", idle], {"config": "x" * 1_000_000})
    assert not hung.ended.is_set()
    with pytest.raises(RuntimeError, match="still lives"):
        hung.code()
    hung.kill()
    assert hung.ended.wait(SOON_S)
    assert hung.code() == -signal.SIGKILL


@pytest.mark.slow
def test_a_stop_of_the_service_is_not_the_run_s_to_heed(tmp_path: Path) -> None:
    """Catches systemd's SIGTERM to every process, which kills a run that has 30 s left."""
    busy = tmp_path / "busy"
    running = Child([sys.executable, "-c", STAYING, str(busy)], {})
    try:
        for _ in range(600):
            if busy.exists():
                break
            assert not running.ended.wait(0.05)
        assert busy.exists()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            running._process.send_signal(number)
        assert not running.ended.wait(0.3)
    finally:
        running.kill()
    assert running.ended.wait(SOON_S)
    assert running.code() == -signal.SIGKILL


# the worker beside it


@pytest.mark.slow
def test_a_worker_outlasts_a_long_outage(
    db: Database, queue: Queue, take: Take, peek: Peek
) -> None:
    """Catches an end that is left to the reaper, who takes it for a death."""
    run_id, claim = queue(), take()
    tries = iter([StoreError("away"), StoreError("away"), None])

    def write() -> None:
        trouble = next(tries)
        if trouble is not None:
            raise trouble
        fail(db, claim, Failure("internal", "x", "X"))

    brief = replace(claim, lease_s=0.0)
    assert insist(write, brief) is False
    assert insist(write, brief, threading.Event()) is True
    assert peek(run_id, "status") == RunStatus.FAILED


def test_who_holds_a_run_speaks_first_after_an_outage(
    db: Database, queue: Queue, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a reaper that finds all leases run out because nobody could renew them."""
    run_id = queue()
    take()
    db.clock_shift = timedelta(seconds=200)
    told: list[Trouble] = []
    worker = Worker(db, Over(0), tell=lambda _, trouble: told.append(trouble))
    real, looks = components.note_seen, []

    def away_at_first(*given: Any) -> None:
        looks.append(len(told))
        if len(looks) == 1:
            raise StoreError("away")
        if len(looks) == 4:
            worker.ask_to_stop()
        real(*given)

    monkeypatch.setattr("quantwatch.worker.worker.note_seen", away_at_first)
    worker._pace = Pace(reap_s=0.0)
    worker._reap()
    assert looks == [0, 0, 0, 1]
    assert [trouble.run_id for trouble in told] == [run_id]


def test_a_worker_survives_what_the_alerts_say(db: Database, queue: Queue, take: Take) -> None:
    """Catches a wrong rule that ends the service, and with it the runs of all other checks."""
    queue("broken")
    take()
    db.clock_shift = timedelta(seconds=200)
    tried = threading.Event()

    def tell(*_: object) -> None:
        tried.set()
        raise UserError("rule 3 names no metric")

    worker = Worker(db, Over(1), pace=Pace(poll_s=0.01, reap_s=0.01), tell=tell)
    worker.start()
    assert tried.wait(SOON_S)
    db.clock_shift += timedelta(minutes=5)
    queue("also-broken")
    tried.clear()
    assert tried.wait(SOON_S)
    worker.stop(SOON_S)
    assert (worker.failure, worker.is_alive) == (None, False)


def test_a_step_renews_the_lease(db: Database, queue: Queue, take: Take) -> None:
    """Catches a run that is taken away between its start and its first heartbeat."""
    queue()
    claim = take()
    db.clock_shift = timedelta(seconds=100)
    leases.advance(db, claim, RunEvent.PREPARE)
    db.clock_shift = timedelta(seconds=200)
    leases.heartbeat(db, claim, Report())
