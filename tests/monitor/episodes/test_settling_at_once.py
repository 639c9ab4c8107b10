"""Several processes at the same alerts, and one that is killed in the middle."""

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from quantwatch.domain import RuleOutcome, RunResult
from quantwatch.pipeline.alerting import settler, watch
from quantwatch.store import runs
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import DeliveryRow, EpisodeRow, EventRow, RuleEvaluationRow, RunRow

Say = Callable[..., RuleOutcome]
Service = Any
FIRST, RESOLVED = ("alert.firing", "first"), ("alert.resolved", "resolved_all")

_KILLED = """
import os, pickle, signal, sys
from sqlalchemy import event
from quantwatch.pipeline.alerting import settler
from quantwatch.store import runs
from quantwatch.store.session import open_database
result, check, config = pickle.load(open(sys.argv[2], "rb"))
database = open_database(sys.argv[1])
def kill(*_): os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "inside":
    event.listen(database.engine, "commit", kill)
runs.finish_run(database, result, None, (), then=settler(check, config))
kill()
"""


def at_once(service: Service, work: Iterable[Callable[[Database], Any]]) -> list[Any]:
    """Run each on a database of its own, all released at the same moment."""
    jobs = list(work)
    gate = threading.Barrier(len(jobs))

    def one(job: Callable[[Database], Any]) -> Any:
        database = open_database(service.db.url, wait_s=20)
        database.clock_shift = service.db.clock_shift
        gate.wait(20)
        try:
            return job(database)
        finally:
            database.close()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(one, job) for job in jobs]]


def test_runs_that_end_at_once_are_all_counted(service: Service, say: Say) -> None:
    """Catches a lost update: four of four breaches must count, and one message be written."""
    breach = say("breach", enter_runs=4)
    results = [service.result(service.queue(), breach) for _ in range(4)]
    then = settler(service.settings, service.config)

    def finishing(result: RunResult) -> Callable[[Database], None]:
        return lambda database: runs.finish_run(database, result, None, (), then=then)

    at_once(service, map(finishing, results))
    assert (service.state(), service.heard()) == ("firing", [FIRST])
    with service.db.reader() as session:
        assert session.scalar(select(EpisodeRow.num_runs)) == 4
        assert session.scalar(select(func.count()).select_from(EpisodeRow)) == 1


def test_watchers_at_once_tell_once(service: Service, say: Say) -> None:
    """Catches a reminder per process, and a dead-man alert per scheduler."""
    service.alerting = {"confirm": False, "reminder": "12h"}
    service.run(say("breach"))
    service.change_check(unhealthy_runs=2)
    service.db.clock_shift += timedelta(hours=13)
    told = at_once(service, [lambda database: watch(database, service.config)] * 4)
    assert sum(told) == 1
    assert service.heard() == [FIRST, FIRST]


def test_a_run_and_the_watch_at_once(service: Service, say: Say) -> None:
    """Catches a health alert that is told after the success that ended it."""
    service.change_check(unhealthy_runs=2)
    result = service.result(service.queue(), say("clear"))
    then = settler(service.settings, service.config)
    at_once(
        service,
        [
            lambda database: runs.finish_run(database, result, None, (), then=then),
            lambda database: watch(database, service.config),
        ],
    )
    assert service.heard() in ([], [FIRST, RESOLVED])
    assert service.state("health", "") == "inactive"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["inside", "after"])
def test_kill_9_around_the_commit(service: Service, say: Say, tmp_path: Path, when: str) -> None:
    """Catches a state without its message, or a message without its state (K7, K8)."""
    result = service.result(service.queue(), say("breach"))
    given = tmp_path / "given.pickle"
    given.write_bytes(pickle.dumps((result, service.settings, service.config)))
    command = [sys.executable, "-c", _KILLED, service.db.url, str(given), when]
    assert subprocess.run(command, check=False).returncode == -9
    tables = (EpisodeRow, EventRow, DeliveryRow, RuleEvaluationRow)
    with service.db.reader() as session:
        counts = [session.scalar(select(func.count()).select_from(table)) for table in tables]
        status = session.scalar(select(RunRow.status))
    expected = ([0, 0, 0, 0], "queued") if when == "inside" else ([1, 1, 2, 1], "succeeded")
    assert (counts, status) == expected
    if when == "inside":
        service.finish(result)
    assert (service.state(), service.heard()) == ("firing", [FIRST])
