"""The worker: one run at a time, watched to its end, whatever its process does."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from quantwatch.domain import RunEvent, RunResult, RunStatus, Suite
from quantwatch.errors import StoreError
from quantwatch.observability import meters
from quantwatch.store import endings, leases
from quantwatch.store.attempts import Failure, list_attempts
from quantwatch.store.cancelling import request_cancel
from quantwatch.store.components import list_components
from quantwatch.store.endings import Trouble
from quantwatch.store.leases import Claim
from quantwatch.store.reaper import reap
from quantwatch.store.runs import finish_run
from quantwatch.store.session import Database
from quantwatch.worker import Pace, Worker

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
Make = Callable[..., RunResult]

WRONG = Failure("config_invalid", "no such rule", "ConfigError")
QUICK = Pace(poll_s=0.01, look_s=0.01, reap_s=0.01, kill_after_s=0.0)
SOON_S = 20.0


class Fake:
    """A process that does what a test says, and then sits there unless it is over."""

    def __init__(
        self, act: Callable[[Claim], object], *, over: bool = True, code: int = -signal.SIGKILL
    ) -> None:
        self._act, self._over, self.exit_code = act, over, code
        self.ended = threading.Event()
        self.began = threading.Event()
        self.claims: list[Claim] = []
        self.kills = 0

    def __call__(self, claim: Claim) -> "Fake":
        self.claims.append(claim)
        self._act(claim)
        self.began.set()
        if self._over:
            self.ended.set()
        return self

    def kill(self) -> None:
        self.kills += 1
        self.ended.set()

    def code(self) -> int:
        return self.exit_code


def nothing(_: Claim) -> None:
    """A process that hangs, or dies at once."""


@contextmanager
def working(worker: Worker) -> Iterator[None]:
    worker.start()
    try:
        yield
    finally:
        worker.stop(SOON_S)
        assert not worker.is_alive


def outcomes(db: Database, run_id: str) -> list[str | None]:
    return [attempt.outcome for attempt in list_attempts(db, run_id)]


def test_nothing_to_do(db: Database) -> None:
    assert Worker(db, Fake(nothing)).run_once() is False


def test_a_run_that_ends_by_itself_is_left_as_it_is(db: Database, queue: Queue, peek: Peek) -> None:
    """Catches a worker that takes the reason of a run away."""
    run_id = queue("alone")
    fake = Fake(lambda claim: endings.fail(db, claim, WRONG))
    counted = meters.RUNS.labels(check="alone", status="failed")._value.get()

    assert Worker(db, fake).run_once() is True
    assert peek(run_id, "status", "reason_code") == (RunStatus.FAILED, "config_invalid")
    assert outcomes(db, run_id) == ["failed"]
    assert meters.RUNS.labels(check="alone", status="failed")._value.get() == counted + 1


def test_a_success_is_counted_with_its_verdicts(
    db: Database, queue: Queue, make_result: Make, suite: Suite
) -> None:
    """Catches verdicts that /metrics never hears of: a run's own process has gone by then."""
    run_id = queue("counted")

    def succeed(claim: Claim) -> None:
        for event in ("prepare", "measure", "finalize"):
            leases.advance(db, claim, RunEvent(event))
        result = make_result(run_id=run_id, check="counted")
        finish_run(db, result, suite, (), lease=claim.token)

    labels = {"check": "counted", "variant": "int4", "verdict": "regression"}
    series = meters.VERDICTS.labels(**labels), meters.RUNS.labels("counted", "succeeded")
    before = [each._value.get() for each in series]
    assert Worker(db, Fake(succeed)).run_once()
    assert [each._value.get() for each in series] == [count + 1 for count in before]


def test_a_run_that_ended_is_not_stopped(
    db: Database, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches "run is stopped: lost" of a run that ended well, in a process slow to go."""
    caplog.set_level("INFO", logger="quantwatch")
    run_id = queue("slow")
    counted = meters.RUNS.labels(check="slow", status="failed")._value.get()

    Worker(
        db, Fake(lambda claim: endings.fail(db, claim, WRONG), over=False), pace=QUICK
    ).run_once()
    assert outcomes(db, run_id) == ["failed"]
    assert meters.RUNS.labels(check="slow", status="failed")._value.get() == counted + 1
    assert "run is stopped" not in caplog.text
    assert "run ended" in caplog.text


def test_the_log_says_how_a_run_ended(
    db: Database,
    queue: Queue,
    make_result: Make,
    suite: Suite,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a log in which runs begin and never end."""
    caplog.set_level("INFO", logger="quantwatch")
    run_id = queue("told")

    def succeed(claim: Claim) -> None:
        for event in ("prepare", "measure", "finalize"):
            leases.advance(db, claim, RunEvent(event))
        finish_run(db, make_result(run_id=run_id, check="told"), suite, (), lease=claim.token)

    Worker(db, Fake(succeed)).run_once()
    (ended,) = [each for each in caplog.records if each.getMessage().startswith("run ended")]
    facts = vars(ended)["quantwatch_facts"]
    assert (facts["run"], facts["status"]) == (run_id, "succeeded")
    assert facts["verdict"] == "regression"


def test_a_process_that_dies_without_a_word(db: Database, queue: Queue, peek: Peek) -> None:
    """Catches two minutes of waiting for a lease although the worker saw its process die."""
    run_id = queue()
    told: list[Trouble] = []
    Worker(db, Fake(nothing), tell=lambda _, trouble: told.append(trouble)).run_once()

    assert peek(run_id, "status", "verdict") == (RunStatus.QUEUED, None)
    (attempt,) = list_attempts(db, run_id)
    assert (attempt.outcome, attempt.reason_code) == ("abandoned", "killed")
    assert attempt.message == "its process ended without a word: killed by SIGKILL"
    assert [trouble.status for trouble in told] == [RunStatus.QUEUED]


def test_three_dead_processes_are_a_poison_run(db: Database, queue: Queue) -> None:
    """Catches a check that takes the machine's memory for ever (§6.4, 6)."""
    queue()
    told: list[bool] = []
    worker = Worker(db, Fake(nothing), tell=lambda _, trouble: told.append(trouble.quarantined))
    for _ in range(3):
        assert worker.run_once()
        db.clock_shift += timedelta(minutes=15)
    queue()

    assert told == [False, False, True]
    assert worker.run_once() is False


def test_no_process_can_be_started(db: Database, queue: Queue, peek: Peek) -> None:
    """Catches a machine without processes left that ends the worker, and keeps the run."""
    run_id = queue()

    def refuse(_: Claim) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    assert Worker(db, Fake(refuse)).run_once()
    assert peek(run_id, "status") == RunStatus.QUEUED
    assert [a.reason_code for a in list_attempts(db, run_id)] == ["internal"]


def test_a_cancelled_run_that_does_not_stop_is_killed(
    db: Database, queue: Queue, peek: Peek
) -> None:
    """Catches a cancellation that waits for a model that loads for an hour (X13)."""
    run_id = queue()
    ask = lambda claim: request_cancel(db, claim.run_id, actor="ann", reason="no")  # noqa: E731
    fake = Fake(ask, over=False)

    Worker(db, fake, pace=QUICK).run_once()
    assert fake.kills == 1
    assert peek(run_id, "status", "reason_text") == (RunStatus.CANCELLED, "cancelled by ann: no")
    assert outcomes(db, run_id) == ["cancelled"]


def test_a_run_past_its_deadline_is_killed(db: Database, queue: Queue, peek: Peek) -> None:
    """Catches a run that hangs in a library and holds the device for ever (F5)."""
    run_id = queue(deadline_s=0.05)
    fake = Fake(nothing, over=False)

    Worker(db, fake, pace=QUICK).run_once()
    assert fake.kills == 1
    assert peek(run_id, "status", "reason_code") == (RunStatus.TIMED_OUT, "deadline")


def test_a_run_that_was_taken_away_is_killed(db: Database, queue: Queue, peek: Peek) -> None:
    """Catches a worker that measures on beside the one that has the run now."""
    run_id = queue()

    def lose(_: Claim) -> None:
        db.clock_shift += timedelta(seconds=121)
        assert [run_id] == [trouble.run_id for trouble in reap(db)]

    fake = Fake(lose, over=False)
    Worker(db, fake, pace=QUICK).run_once()
    assert fake.kills == 1
    assert outcomes(db, run_id) == ["abandoned"]


def test_a_database_that_hiccups_ends_no_run(
    db: Database, queue: Queue, peek: Peek, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that is killed because nobody could look at it for a moment."""
    run_id = queue()
    fake = Fake(nothing, over=False)
    looks = iter([StoreError("locked"), StoreError("locked"), None])

    def look(_: Database, claim: Claim) -> leases.Standing:
        trouble = next(looks)
        if trouble is not None:
            raise trouble
        endings.fail(db, claim, WRONG)
        fake.ended.set()
        return leases.Standing(None, -1.0)

    monkeypatch.setattr(leases, "standing", look)
    Worker(db, fake, pace=QUICK).run_once()
    assert fake.kills == 0
    assert peek(run_id, "status") == RunStatus.FAILED


def test_a_stopped_worker_gives_its_run_back(db: Database, queue: Queue, peek: Peek) -> None:
    """Catches a deploy that costs an attempt, or waits for two hours (§6.1, SIGTERM)."""
    run_id = queue()
    fake = Fake(nothing, over=False)
    worker = Worker(db, fake, pace=Pace(poll_s=0.01, look_s=0.01, shutdown_s=0.0))
    with working(worker):
        assert fake.began.wait(SOON_S)

    assert fake.kills == 1
    assert peek(run_id, "status", "attempt") == (RunStatus.QUEUED, 0)
    assert outcomes(db, run_id) == ["released"]


def test_a_stopped_worker_lets_a_short_run_end(db: Database, queue: Queue, peek: Peek) -> None:
    """Catches work that is thrown away a second before its end; nothing else is claimed."""
    run_id, other = queue(), queue()
    fake = Fake(nothing, over=False)
    worker = Worker(db, fake, pace=Pace(poll_s=0.01, look_s=0.01, shutdown_s=30.0))
    worker.start()
    assert fake.began.wait(SOON_S)
    worker.ask_to_stop()
    endings.fail(db, fake.claims[0], WRONG)
    fake.ended.set()
    worker.stop(SOON_S)

    assert not worker.is_alive
    assert worker.failure is None
    assert fake.kills == 0
    assert peek(run_id, "status") == RunStatus.FAILED
    assert peek(other, "status") == RunStatus.QUEUED


def test_any_worker_looks_after_lost_runs(db: Database, queue: Queue, take: Take) -> None:
    """Catches a dead worker's run that waits for that very worker."""
    queue("lost")
    take()
    db.clock_shift = timedelta(seconds=121)
    seen = threading.Event()
    told: list[Trouble] = []

    def tell(_: object, trouble: Trouble) -> None:
        told.append(trouble)
        seen.set()

    with working(Worker(db, Fake(nothing), pace=QUICK, tell=tell)):
        assert seen.wait(SOON_S)
    assert [(t.check, t.status) for t in told] == [("lost", RunStatus.QUEUED)]


def test_a_worker_is_on_the_list_while_it_lives(db: Database) -> None:
    """Catches a list of parts that nobody is in, or whose dead never leave."""
    worker = Worker(db, Fake(nothing), devices=("cpu", "cuda:0"), pace=QUICK)
    worker._look_around()
    with db.reader() as session:
        (seen,) = list_components(session)
    assert (seen.component.kind, seen.details["devices"]) == ("worker", ["cpu", "cuda:0"])
    worker.stop()
    with db.reader() as session:
        assert list_components(session) == []


def test_a_worker_that_breaks_says_so(db: Database, queue: Queue) -> None:
    """Catches a service that looks alive and claims nothing."""
    queue()
    broken = RuntimeError("a mistake of ours")

    def fail(_: Claim) -> None:
        raise broken

    worker = Worker(db, Fake(fail), pace=QUICK)
    worker.start()
    for thread in worker._threads:
        thread.join(SOON_S)
    assert worker.failure is broken
    assert not worker.is_alive
    worker.stop()
