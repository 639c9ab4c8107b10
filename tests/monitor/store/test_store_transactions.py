"""One run = one transaction: all of it or nothing, whatever happens, and nobody loses anything."""

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.orm import Session

from quantwatch.domain import MODEL, Block, RunResult, RunStatus, Scope, Suite
from quantwatch.errors import ConflictError, StoreError
from quantwatch.store import latest, runs
from quantwatch.store.blocks import list_blocks
from quantwatch.store.runs import begin_run, finish_run, get_result, latest_by_check, list_runs
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import Base
from quantwatch.telemetry import new_run_id

Make = Callable[..., RunResult]
Begin = Callable[[Database, RunResult], None]

_KILLED = """
import os, pickle, signal, sys
from quantwatch.store import latest, runs
from quantwatch.store.session import open_database
result, suite, blocks = pickle.load(open(sys.argv[2], "rb"))
runs.note_ended = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
runs.finish_run(open_database(sys.argv[1]), result, suite, blocks)
"""


def _counts(db: Database) -> dict[str, int]:
    """Rows of every table."""
    with db.reader() as session:
        return {
            name: session.scalar(select(func.count()).select_from(table)) or 0
            for name, table in Base.metadata.tables.items()
        }


def test_results_outlast_a_deadlock(
    db: Database,
    make_result: Make,
    begin: Begin,
    suite: Suite,
    token_blocks: tuple[Block, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches hours of measuring that are repeated because PostgreSQL ended one transaction."""
    result, told = make_result(), []
    begin(db, result)

    def tell(_session: Session, told_of: RunResult) -> None:
        told.append(told_of.run_id)
        if len(told) == 1:
            raise ConflictError("ended because of a deadlock")

    finish_run(db, result, suite, iter(token_blocks), then=tell)
    assert told == [result.run_id] * 2
    assert get_result(db, result.run_id).status is RunStatus.SUCCEEDED
    assert len(list_blocks(db, result.run_id, "int8")) == len(token_blocks)


def test_a_failing_block_leaves_nothing(
    db: Database, make_result: Make, begin: Begin, suite: Suite, token_blocks: tuple[Block, ...]
) -> None:
    """Catches a run with measurements but without the blocks that belong to them."""
    result = make_result()
    begin(db, result)
    before = _counts(db)

    def blocks() -> Iterator[Block]:
        yield from token_blocks
        raise OSError("the spool is gone")

    with pytest.raises(OSError, match="the spool is gone"):
        finish_run(db, result, suite, blocks())
    assert _counts(db) == before
    assert list_runs(db)[0].status is RunStatus.PREPARING


def test_a_failure_at_the_very_end_leaves_nothing(
    db: Database,
    make_result: Make,
    begin: Begin,
    suite: Suite,
    token_blocks: tuple[Block, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a commit in the middle; afterwards the same result can be saved."""
    result = make_result()
    begin(db, result)
    before = _counts(db)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "note_ended", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finish_run(db, result, suite, token_blocks)
    assert _counts(db) == before
    finish_run(db, result, suite, token_blocks)
    assert get_result(db, result.run_id) == result


@pytest.mark.slow
def test_kill_9_in_the_transaction_leaves_nothing(
    db: Database,
    make_result: Make,
    begin: Begin,
    suite: Suite,
    token_blocks: tuple[Block, ...],
    tmp_path: Path,
) -> None:
    """Catches half a run after a power cut, and a lock that outlives its process."""
    result = make_result()
    begin(db, result)
    before = _counts(db)
    given = tmp_path / "given.pickle"
    given.write_bytes(pickle.dumps((result, suite, token_blocks)))
    done = subprocess.run([sys.executable, "-c", _KILLED, db.url, str(given)], check=False)
    assert done.returncode == -9
    assert _counts(db) == before
    finish_run(db, result, suite, token_blocks)
    assert get_result(db, result.run_id) == result


def _pausing(written: threading.Event, seen: threading.Event) -> Callable[..., None]:
    """The last step of a transaction, which then waits before it may commit."""

    def pause(session: Session, check_id: int, run_id: str, status: RunStatus) -> None:
        latest.note_ended(session, check_id, run_id, status)
        written.set()
        assert seen.wait(20)

    return pause


def test_readers_see_the_state_before_until_the_commit(
    db: Database,
    make_result: Make,
    begin: Begin,
    suite: Suite,
    token_blocks: tuple[Block, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a page that waits for the writer, or shows a run before its verdict."""
    result = make_result()
    begin(db, result)
    before = _counts(db)
    written, seen = threading.Event(), threading.Event()
    monkeypatch.setattr(runs, "note_ended", _pausing(written, seen))
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(finish_run, db, result, suite, token_blocks)
        assert written.wait(20)
        try:
            assert _counts(db) == before
            assert list_runs(db)[0].status is RunStatus.PREPARING
            assert latest_by_check(db) == []
            assert list_blocks(db, result.run_id, "int8") == []
        finally:
            seen.set()
        writing.result()
    assert get_result(db, result.run_id) == result
    assert len(list_blocks(db, result.run_id, "int8")) == 3


def test_a_reader_keeps_its_state(db: Database, make_result: Make, begin: Begin) -> None:
    """Catches a result put together from two states of the database."""
    begin(db, make_result())
    with db.reader() as session:
        assert session.scalar(text("SELECT count(*) FROM run")) == 1
        begin(db, make_result(days=1))
        assert session.scalar(text("SELECT count(*) FROM run")) == 1
    assert len(list_runs(db)) == 2


def _write_shuffled(db: Database, make: Make, suite: Suite, number: tuple[int, int]) -> RunResult:
    """Save a run. Every writer adds the same new names, each in another order."""
    rng = np.random.default_rng(number)
    candidate = make().candidates[0]
    scopes = [Scope(f"layers.{number[1]}.part{k}") for k in rng.permutation(6)]
    rows = tuple(replace(candidate.measurements[0], scope=scope) for scope in scopes)
    result = make(
        run_id=new_run_id(),
        environment={"run": number[1]},
        candidates=(replace(candidate, measurements=rows),),
        alerts=(),
    )
    begin_run(db, run_id=result.run_id, check="nightly", config={}, started_at=result.started_at)
    block = Block("int8", "per_token", f"metric{number[1]}", 0, (MODEL,), rng.random((1, 8)))
    finish_run(db, result, suite, [block])
    return result


@pytest.mark.slow
def test_writers_at_once_lose_nothing(db: Database, make_result: Make, suite: Suite) -> None:
    """Catches "database is locked" (B10), a deadlock, and a name that is written twice."""
    num_writers, num_runs = 4, 8
    gate = threading.Barrier(num_writers)

    def write(writer: int) -> list[RunResult]:
        own = open_database(db.url, wait_s=60)
        gate.wait()
        results = [_write_shuffled(own, make_result, suite, (writer, i)) for i in range(num_runs)]
        own.close()
        return results

    with ThreadPoolExecutor(num_writers) as pool:
        written = [result for batch in pool.map(write, range(num_writers)) for result in batch]
    assert len(written) == num_writers * num_runs
    for result in written:
        assert get_result(db, result.run_id) == result
    counts = _counts(db)
    assert (counts["run"], counts["block"], counts["check"]) == (32, 32, 1)
    assert (counts["environment"], counts["scope"]) == (num_runs, num_runs * 6 + 1)


def test_a_reader_that_writes_later_does_not_fail(db: Database, make_result: Make) -> None:
    """Catches SQLITE_BUSY_SNAPSHOT: reading first and writing later, with a commit in between."""
    result = make_result()
    with ThreadPoolExecutor(1) as pool:
        with db.writer() as session:
            assert session.scalar(text("SELECT count(*) FROM run")) == 0
            other = pool.submit(_begin_elsewhere, db, result)
            # Time for the other one to commit, if nothing kept it waiting.
            wait([other], timeout=0.3)
            session.execute(text("INSERT INTO metric (slug) VALUES ('x')"))
        other.result()
    assert [run.run_id for run in list_runs(db)] == [result.run_id]
    assert _counts(db)["metric"] == 1


def _begin_elsewhere(db: Database, result: RunResult) -> None:
    begin_run(db, run_id=result.run_id, check="x", config={}, started_at=result.started_at)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_full_disk_leaves_nothing(
    db: Database, make_result: Make, begin: Begin, suite: Suite
) -> None:
    """Catches half a run when the disk fills up (`max_page_count`, since tests run as root)."""
    result = make_result()
    begin(db, result)
    before = _counts(db)
    noise = np.random.default_rng(0).random((1, 400_000))
    blocks = [Block("int8", "per_token", "rel_error", 0, (MODEL,), noise)]
    limited = open_database(db.url)

    @event.listens_for(limited.engine, "connect")
    def limit(connection: object, _record: object) -> None:
        connection.execute("PRAGMA max_page_count = 120")  # type: ignore[attr-defined]

    with pytest.raises(StoreError, match=r"sqlite:///.* is full"):
        finish_run(limited, result, suite, blocks)
    limited.close()
    assert _counts(db) == before
    finish_run(db, result, suite, blocks)
    assert get_result(db, result.run_id) == result
