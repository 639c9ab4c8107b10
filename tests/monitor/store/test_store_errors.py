"""Every trouble with a database is one line: which one, what is wrong, what to do."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import event, text

from quantwatch.domain import RunResult
from quantwatch.errors import StoreError
from quantwatch.store.runs import get_result, list_runs
from quantwatch.store.schema import REVISIONS
from quantwatch.store.session import Database, open_database
from quantwatch.store.upgrade import schema_state, upgrade

Make = Callable[..., RunResult]
Begin = Callable[[Database, RunResult], None]


@pytest.fixture
def locked(sqlite_file: Path) -> Iterator[str]:
    """A database whose write lock somebody else holds."""
    with closing(sqlite3.connect(sqlite_file, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield f"sqlite:///{sqlite_file}"


def test_locked_waits_a_bounded_time(locked: str, make_result: Make, begin: Begin) -> None:
    """Catches a check that hangs for ever, or fails at once, or looks like a regression (B09)."""
    db = open_database(locked, wait_s=0.3)
    assert list_runs(db) == []
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"^Database sqlite:///.*file.db is locked by another"):
        begin(db, make_result())
    assert 0.2 < time.monotonic() - started < 5
    db.close()


def test_a_short_lock_is_waited_for(sqlite_file: Path, make_result: Make, begin: Begin) -> None:
    """Catches a busy timeout that does not hold for BEGIN IMMEDIATE (B10)."""
    holder = sqlite3.connect(sqlite_file, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, holder.execute, ["COMMIT"])
    release.start()
    db = open_database(f"sqlite:///{sqlite_file}", wait_s=20)
    begin(db, make_result())
    release.join()
    holder.close()
    assert len(list_runs(db)) == 1
    db.close()


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_postgres_waits_a_bounded_time(db: Database, make_result: Make, begin: Begin) -> None:
    """Catches a check that queues behind another session's lock for ever."""
    with db.writer() as session:
        session.execute(text("LOCK TABLE run IN EXCLUSIVE MODE"))
        other = open_database(db.url, wait_s=0.3)
        with pytest.raises(StoreError, match="is locked by another session"):
            begin(other, make_result())
        other.close()


def test_a_read_only_file_is_readable(sqlite_file: Path, make_result: Make, begin: Begin) -> None:
    """Catches a dashboard that can't show a database it may not write to (`mode=ro`)."""
    db = open_database(f"sqlite:///{sqlite_file}")
    result = make_result()
    begin(db, result)
    db.close()
    for url in (
        f"sqlite:///file:{sqlite_file}?mode=ro&uri=true",
        f"sqlite:///{sqlite_file}?mode=ro",
    ):
        read_only = open_database(url)
        assert get_result(read_only, result.run_id).check == "nightly"
        assert schema_state(url) == "current"
        with pytest.raises(StoreError, match="opened read-only; nothing can be written"):
            begin(read_only, make_result())
        read_only.close()


def test_a_full_disk_is_named(sqlite_file: Path, make_result: Make, begin: Begin) -> None:
    """Catches a full disk that ends in a traceback."""
    db = open_database(f"sqlite:///{sqlite_file}")

    @event.listens_for(db.engine, "connect")
    def limit(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA max_page_count = 10")

    with pytest.raises(StoreError, match="is full: no space left"):
        begin(db, make_result(config={"text": "x" * 100_000}))
    db.close()


def _missing(path: Path) -> None:
    pass


def _no_tables(path: Path) -> None:
    sqlite3.connect(path).close()
    path.touch()


def _text(path: Path) -> None:
    path.write_text("this is a text file, long enough to have a header\n" * 100)


def _folder(path: Path) -> None:
    path.mkdir()


def _ahead(path: Path) -> None:
    upgrade(f"sqlite:///{path}")
    _set_revision(path, "9999")


def _behind(path: Path) -> None:
    upgrade(f"sqlite:///{path}")
    _set_revision(path, None)


def _foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE customers (id INTEGER)")


def _corrupt(path: Path) -> None:
    upgrade(f"sqlite:///{path}")
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(content)


def _set_revision(path: Path, revision: str | None) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        if revision is None:
            connection.execute("DELETE FROM alembic_version")
        else:
            connection.execute("UPDATE alembic_version SET version_num = ?", [revision])


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        pytest.param(_missing, "does not exist yet; run `quantwatch db upgrade`", id="missing"),
        pytest.param(_no_tables, "no tables yet; run `quantwatch db upgrade`", id="empty"),
        pytest.param(_behind, "no tables yet; run `quantwatch db upgrade`", id="not migrated"),
        pytest.param(_ahead, "schema of a newer quantwatch; update this program", id="ahead"),
        pytest.param(_text, "is not a database file", id="text file"),
        pytest.param(_folder, "is a folder; name a file in it", id="folder"),
        pytest.param(_foreign, r"tables of another program \(customers", id="another program"),
        pytest.param(_corrupt, "is corrupt; restore it from a backup", id="corrupt"),
    ],
)
def test_an_unusable_file_is_named(
    tmp_path: Path, prepare: Callable[[Path], None], words: str
) -> None:
    """Catches tracebacks, and a new empty database where a path was mistyped."""
    path = tmp_path / "some.db"
    prepare(path)
    existed = path.exists()
    with pytest.raises(StoreError, match=words) as caught:
        open_database(f"sqlite:///{path}")
    assert "some.db" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.exists() == existed


def test_a_schema_behind_says_how_to_upgrade(
    sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an old database that is read with new tables in mind."""
    monkeypatch.setattr("quantwatch.store.schema.REVISIONS", (*REVISIONS, "9999"))
    assert schema_state(f"sqlite:///{sqlite_file}") == "behind"
    with pytest.raises(StoreError, match="older quantwatch; run `quantwatch db upgrade`"):
        open_database(f"sqlite:///{sqlite_file}")


def test_an_ahead_schema_is_not_migrated(sqlite_file: Path) -> None:
    """Catches an old program that tears down what a newer one has built."""
    _set_revision(sqlite_file, "9999")
    assert schema_state(f"sqlite:///{sqlite_file}") == "ahead"
    with pytest.raises(StoreError, match="newer quantwatch"):
        upgrade(f"sqlite:///{sqlite_file}")


def test_our_own_mistakes_stay_visible(db: Database) -> None:
    """Catches a bug that is reported as trouble with the database."""
    with pytest.raises(KeyError), db.reader():
        raise KeyError("ours")
    with (
        pytest.raises(StoreError, match=r"schema this program doesn't know"),
        db.reader() as session,
    ):
        session.execute(text("SELECT * FROM nowhere"))
