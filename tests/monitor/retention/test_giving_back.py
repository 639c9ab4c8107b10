"""Freed pages go back to the disk in slices, and a kill in the middle changes nothing."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from quantwatch.config.service import RetentionConfig
from quantwatch.store import vacuum
from quantwatch.store.retention import plan, step
from quantwatch.store.session import Database

Stored = Any
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

WORKER = """
import sys
from types import SimpleNamespace
from quantwatch.config.service import RetentionConfig
from quantwatch.store import retention
from quantwatch.store.session import open_database

# Every batch takes no time: how many there are does not depend on the machine.
retention.time = SimpleNamespace(monotonic=lambda: 0.0)
calls = []
real = retention._count
def count(*arguments):
    calls.append(1)
    real(*arguments)
def deletion(task, size, real=retention._deletion):
    if len(calls) == int(sys.argv[2]):
        sys.stdout.write("inside\\n")
        sys.stdout.flush()
        found = real(task, size)
        return Stuck(found)
    return real(task, size)
class Stuck:
    def __init__(self, found):
        self.found = found
retention._count, retention._deletion = count, deletion
from sqlalchemy.orm import Session
scalars = Session.scalars
def stuck(self, statement, *rest):
    if isinstance(statement, Stuck):
        scalars(self, statement.found, *rest).all()
        sys.stdout.write("deleted\\n")
        sys.stdout.flush()
        sys.stdin.read()
    return scalars(self, statement, *rest)
Session.scalars = stuck
config = RetentionConfig.model_validate_json(sys.argv[3])
retention.step(open_database(sys.argv[1]), config, orphans=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("batches", [0, 2, 6])
def test_sigkill_inside_a_batch_loses_and_breaks_nothing(
    db: Database, stored: Stored, config: RetentionConfig, batches: int
) -> None:
    """Catches a half-deleted run after a kill (K11): the batch is undone, the next step goes on."""
    stored.add(400, suite_name="old", tokenizer="old")
    runs = stored.nightly(range(0, 40, 8))
    planned, before = plan(db, config), [stored.tiers(run) for run in runs]
    command = [sys.executable, "-c", WORKER, db.url, str(batches), config.model_dump_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"inside\n", b"deleted\n"]
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert stored.broken_references() == []
    left = plan(db, config)
    if batches == 0:
        assert (left.deleted, [stored.tiers(run) for run in runs]) == (planned.deleted, before)
    assert left.deleted.total() <= planned.deleted.total()
    assert step(db, config, orphans=True, budget_s=60).deleted == left.deleted
    assert plan(db, config).deleted == {}
    assert stored.tiers(runs[0]) == "TPLR"
    assert stored.broken_references() == []


@ON_SQLITE
def test_the_file_shrinks(db: Database, stored: Stored, config: RetentionConfig) -> None:
    """Catches a database whose file only grows (B11)."""
    _grow(db, stored)
    before = _file(db).stat().st_size
    report = step(db, config, budget_s=60)
    assert report.freed_bytes > 30 * BIG
    assert _file(db).stat().st_size == before - report.freed_bytes
    with db.reader() as session:
        assert session.scalar(text("PRAGMA freelist_count")) == 0
        assert session.scalar(text("PRAGMA integrity_check")) == "ok"


@ON_SQLITE
def test_pages_are_given_back_in_slices(
    db: Database, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the statement that frees one page only, and one slice as long as the file."""
    _grow(db, stored)
    with db.writer() as session:
        session.execute(text("DELETE FROM block"))
    monkeypatch.setattr(vacuum, "SLICE_PAGES", 3)
    page = 4096
    assert vacuum.give_back(db, lambda _: False, deadline=float("inf")) == 0, "somebody needs it"
    looks = iter([True, True, False])
    assert vacuum.give_back(db, lambda _: next(looks), deadline=float("inf")) == 6 * page
    assert vacuum.give_back(db, lambda _: True, deadline=0.0) == 0


@ON_SQLITE
def test_nobody_is_waited_for(db: Database, stored: Stored, config: RetentionConfig) -> None:
    """Catches a checkpoint that waits for a page's long reader, and a log that is never cut."""
    _grow(db, stored)
    log = _file(db).with_name("quantwatch.db-wal")
    with db.reader() as other, db.reader() as session:
        other.scalar(text("SELECT count(*) FROM run"))
        num_blocks = session.scalar(text("SELECT count(*) FROM block"))
        # Whoever waited for the readers here would wait for ever.
        report = step(db, config, budget_s=60)
        assert report.finished
        assert session.scalar(text("SELECT count(*) FROM block")) == num_blocks, "its own state"
        assert log.stat().st_size > 0
        session.rollback()
        other.rollback()
        vacuum.checkpoint(db)
        assert log.stat().st_size == 0


BIG = 20_000
"""Bytes of a matrix in these tests."""


def _grow(db: Database, stored: Stored) -> None:
    """Store old runs whose matrices fill pages of their own."""
    stored.nightly(range(40, 46))
    with db.writer() as session:
        session.execute(text(f"UPDATE block SET payload = zeroblob({BIG})"))
    vacuum.checkpoint(db)


def test_a_file_without_incremental_vacuum_is_left_alone(tmp_path: Path) -> None:
    """Catches a blocking VACUUM of a database that was made otherwise."""
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum = NONE")
        connection.execute("CREATE TABLE t (x BLOB)")
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
        connection.execute("DELETE FROM t")
        connection.commit()
    from quantwatch.store.session import open_database

    database = open_database(f"sqlite:///{path}", check_schema=False)
    size = path.stat().st_size
    assert vacuum.give_back(database, lambda _: True, deadline=float("inf")) == 0
    database.close()
    assert path.stat().st_size == size


def _file(db: Database) -> Path:
    return Path(db.url.removeprefix("sqlite:///"))
