"""SIGKILL and SIGTERM of real processes at the worst moments (kill points K3 to K7, §7.4)."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunResult, RunStatus, Suite
from quantwatch.store import leases
from quantwatch.store.attempts import list_attempts
from quantwatch.store.leases import Claim
from quantwatch.store.reaper import reap
from quantwatch.store.runs import finish_run, get_result, list_runs
from quantwatch.store.session import Database
from quantwatch.worker import Pace, Worker
from quantwatch.worker.execution import Children
from quantwatch.worker.performing import Surroundings, perform

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
Make = Callable[..., RunResult]
Tiny = tuple[Path, CheckConfig]
SOON_S = 90.0
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""Real models and processes take their time; what differs between databases is tested without."""

# A process that dies at a point: the functions named are replaced by its death.
DYING = """
import os, signal, sys
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
where, name = {
    "K3": ("quantwatch.worker.performing", "perform"),
    "K4": ("quantwatch.pipeline.loading", "load_variant"),
    "K5": ("quantwatch.pipeline.holding", "Watched.advance"),
    "K6": ("quantwatch.store.runs", "_check_of"),
    "K7": ("quantwatch.store.runs", "note_ended"),
}[sys.argv[1]]
"""
CHILD = (
    DYING
    + """
import importlib
from quantwatch.worker import child
owner = importlib.import_module(where)
*path, last = name.split(".")
for part in path:
    owner = getattr(owner, part)
setattr(owner, last, die)
child.main()
"""
)
# A worker without models: it holds the run, writes its results, and dies of it.
HOLDER = (
    DYING
    + """
import importlib, pickle
from quantwatch.domain import RunEvent
from quantwatch.store import leases, runs
from quantwatch.store.attempts import WorkerId
from quantwatch.store.session import open_database
db = open_database(sys.argv[2])
with db.writer() as session:
    claim = leases.claim(session, WorkerId.here("victim"), ["cpu"])
if sys.argv[1] == "K3":
    die()
for event in (RunEvent.PREPARE, RunEvent.MEASURE, RunEvent.FINALIZE):
    leases.advance(db, claim, event)
setattr(importlib.import_module(where), name, die)
result, suite, blocks = pickle.load(open(sys.argv[3], "rb"))
runs.finish_run(db, result, suite, blocks, lease=claim.token)
"""
)
# A worker process as the service runs it: SIGTERM asks it to stop.
SERVICE = """
import json, signal, sys, threading
from pathlib import Path
from quantwatch.store.session import open_database
from quantwatch.worker import Children, Pace, Worker
job = json.loads(sys.argv[1])
db = open_database(job["url"])
children = Children(job["url"], Path(job["cache"]), **({"command": job["command"]} if job["command"] else {}))
worker = Worker(db, children, pace=Pace(poll_s=0.05, look_s=0.05, shutdown_s=job["shutdown_s"]))
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
worker.start()
ended.wait()
worker.stop()
db.close()
"""
# A run that measures for ever, heartbeats and all; it says so in a file.
SLOW_CHILD = """
import sys, threading
from pathlib import Path
from quantwatch.pipeline import holding
from quantwatch.worker import child
def stay(*_):
    Path(sys.argv[1]).touch()
    threading.Event().wait()
holding.Watched.advance = stay
child.main()
"""


class Here:
    """Carries runs out in this process, which has loaded torch by now."""

    def __init__(self, db: Database, cache_dir: Path) -> None:
        self._db, self._around = db, Surroundings(cache_dir)
        self.ended = threading.Event()

    def __call__(self, claim: Claim) -> "Here":
        perform(self._db, claim, self._around)
        self.ended.set()
        return self

    def kill(self) -> None:
        raise AssertionError("nobody kills this process")

    def code(self) -> int:
        return 0


def queue_tiny(queue: Queue, tiny: Tiny, **known: Any) -> str:
    folder, check = tiny
    return queue(config=check.model_dump(mode="json"), base_dir=str(folder), **known)


def until(true: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < give_up, what
        threading.Event().wait(0.05)


@pytest.fixture
def service(db: Database, tmp_path: Path) -> Any:
    """Start worker processes; whatever is left of them is killed at the end."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(
        command: list[str] | None = None, shutdown_s: float = 30.0
    ) -> subprocess.Popen[bytes]:
        job = {
            "url": db.url,
            "cache": str(tmp_path / "cache"),
            "command": command,
            "shutdown_s": shutdown_s,
        }
        process = subprocess.Popen([sys.executable, "-c", SERVICE, json.dumps(job)])
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["K3", "K6", "K7"])
def test_a_killed_worker_leaves_a_run_for_the_next_one(
    db: Database, queue: Queue, take: Take, peek: Peek, invariants: Callable[[], None], *,
    point: str, make_result: Make, suite: Suite, token_blocks: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """Catches half a run, a run that stays active for ever, a device that stays taken (B39, X10, X11)."""
    import pickle

    run_id = queue()
    result, given = make_result(run_id=run_id), tmp_path / "given.pickle"
    given.write_bytes(pickle.dumps((result, suite, token_blocks)))
    done = subprocess.run([sys.executable, "-c", HOLDER, point, db.url, str(given)], check=False)

    assert done.returncode == -signal.SIGKILL
    assert RunStatus(peek(run_id, "status")).is_active
    invariants()
    # No longer than the lease and two rounds of the reaper.
    db.clock_shift = timedelta(seconds=leases.LEASE_S + 30)
    assert [trouble.status for trouble in reap(db)] == [RunStatus.QUEUED]
    invariants()
    db.clock_shift += timedelta(minutes=1)
    claim = take(to="finalizing")
    finish_run(db, result, suite, token_blocks, lease=claim.token)
    assert get_result(db, run_id) == result
    assert [attempt.outcome for attempt in list_attempts(db, run_id)] == ["abandoned", "succeeded"]
    assert peek(run_id, "slot_key") is not None
    assert len(list_runs(db)) == 1
    invariants()


@pytest.mark.slow
@ON_SQLITE
@pytest.mark.parametrize("point", ["K3", "K4", "K5", "K6", "K7"])
def test_a_killed_run_is_carried_out_again(
    db: Database, queue: Queue, peek: Peek, invariants: Callable[[], None], *,
    tiny_check: Tiny, tmp_path: Path, point: str,
) -> None:  # fmt: skip
    """Catches a check that loses its night because its process ran out of memory."""
    run_id = queue_tiny(queue, tiny_check)
    dying = Children(db.url, tmp_path / "cache", command=(sys.executable, "-c", CHILD, point))
    assert Worker(db, dying, pace=Pace(look_s=0.05)).run_once()

    (attempt,) = list_attempts(db, run_id)
    assert (attempt.outcome, attempt.reason_code) == ("abandoned", "killed")
    assert "SIGKILL" in str(attempt.message)
    assert peek(run_id, "status", "verdict") == (RunStatus.QUEUED, None)
    invariants()
    db.clock_shift = timedelta(minutes=2)
    assert (
        Worker(db, Children(db.url, tmp_path / "cache"), pace=Pace(look_s=0.05)).run_once() is True
    )
    result = get_result(db, run_id)
    assert (result.status, result.verdict) == (RunStatus.SUCCEEDED, "regression")
    assert {alert.scope for alert in result.alerts} >= {"layers.2"}
    second = list_attempts(db, run_id)[1]
    assert (second.outcome, second.worker != attempt.worker) == ("succeeded", True)
    assert (second.peak_memory_bytes or 0) > 50_000_000
    invariants()


@pytest.mark.slow
@ON_SQLITE
def test_a_killed_service_leaves_no_process(
    db: Database, queue: Queue, peek: Peek, service: Any, invariants: Callable[[], None], *,
    tiny_check: Tiny, tmp_path: Path,
) -> None:  # fmt: skip
    """Catches a run that measures on after its service was killed, beside the next one (K5)."""
    run_id, busy = queue_tiny(queue, tiny_check), tmp_path / "busy"
    process = service([sys.executable, "-c", SLOW_CHILD, str(busy)])
    until(busy.exists, "the run never measured")
    (child,) = psutil.Process(process.pid).children()

    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "an orphan")
    assert peek(run_id, "status") == RunStatus.MEASURING
    db.clock_shift = timedelta(seconds=leases.LEASE_S + 30)
    assert [trouble.status for trouble in reap(db)] == [RunStatus.QUEUED]
    invariants()


@pytest.mark.slow
@ON_SQLITE
def test_sigterm_gives_a_long_run_back(
    db: Database, queue: Queue, peek: Peek, service: Any, invariants: Callable[[], None], *,
    tiny_check: Tiny, tmp_path: Path,
) -> None:  # fmt: skip
    """Catches a deploy that waits for hours, costs an attempt, or leaves the run to its lease."""
    run_id, busy = queue_tiny(queue, tiny_check), tmp_path / "busy"
    process = service([sys.executable, "-c", SLOW_CHILD, str(busy)], shutdown_s=0.5)
    until(busy.exists, "the run never measured")

    process.send_signal(signal.SIGTERM)
    assert process.wait(SOON_S) == 0
    assert peek(run_id, "status", "attempt") == (RunStatus.QUEUED, 0)
    assert [attempt.outcome for attempt in list_attempts(db, run_id)] == ["released"]
    invariants()


@pytest.mark.slow
@ON_SQLITE
def test_sigterm_lets_a_short_run_end(
    db: Database, queue: Queue, peek: Peek, service: Any, invariants: Callable[[], None], *,
    tiny_check: Tiny,
) -> None:  # fmt: skip
    """Catches work that is thrown away although it needs a few seconds more."""
    run_id, other = queue_tiny(queue, tiny_check), queue_tiny(queue, tiny_check)
    process = service(shutdown_s=SOON_S)
    until(lambda: RunStatus(peek(run_id, "status")).is_active, "nobody claimed it")

    process.send_signal(signal.SIGTERM)
    assert process.wait(SOON_S) == 0
    assert peek(run_id, "status") == RunStatus.SUCCEEDED
    assert peek(other, "status") == RunStatus.QUEUED
    invariants()
