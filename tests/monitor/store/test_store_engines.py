"""How SQLite files are opened where that is not simple."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from quantwatch.errors import StoreError
from quantwatch.store import engines
from quantwatch.store.runs import list_runs
from quantwatch.store.session import Database, open_database


def test_a_file_in_a_read_only_folder_is_readable(
    sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a volume mounted `:ro`, where SQLite can't create the index file of its log.

    Root may write anywhere, so the folder only claims to be read-only.
    """
    seen: list[str] = []
    real = sqlite3.connect

    def connect(target: str, **named: Any) -> sqlite3.Connection:
        seen.append(target)
        connection: sqlite3.Connection = real(target, **named)
        return connection

    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr(sqlite3, "connect", connect)
    db = open_database(f"sqlite:///{sqlite_file}", read_only=True)
    assert list_runs(db) == []
    db.close()
    assert all(uri.endswith("?mode=ro&immutable=1") for uri in seen)
    sqlite_file.with_name("file.db-wal").write_bytes(b"not yet in the file")
    seen.clear()
    open_database(f"sqlite:///{sqlite_file}", read_only=True).close()
    assert not any("immutable" in uri for uri in seen)


def test_a_service_that_starts_later_is_seen(
    sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a dashboard, open since before, that never sees what stands in the log.

    The folder only claims to be read-only, as above.
    """
    url = f"sqlite:///{sqlite_file}"
    monkeypatch.setattr("os.access", lambda *_: False)
    reader = open_database(url, read_only=True)
    assert known(reader) == []
    service = sqlite3.connect(sqlite_file, isolation_level=None)
    service.execute("INSERT INTO \"check\" (name) VALUES ('nightly')")
    seen = known(reader)
    service.close()
    reader.close()
    assert seen == ["nightly"]


def known(db: Database) -> list[str]:
    with db.reader() as session:
        return list(session.scalars(text('SELECT name FROM "check"')))


class _Log:
    """A connection that answers to `PRAGMA journal_mode` as it is told."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def execute(self, _sql: str) -> "_Log":
        if self.answers[0] == "busy":
            del self.answers[0]
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorname = "SQLITE_BUSY"
            raise error
        return self

    def fetchone(self) -> tuple[str]:
        return (self.answers[0],)


def test_the_log_is_waited_for_and_checked() -> None:
    """Catches two first openers at once, and a network file system that has no shared memory."""
    patient: Any = _Log("busy", "busy", "wal")
    engines._prepare(patient, "sqlite:///x.db", "rw", 5)
    assert patient.answers == ["wal"]
    hasty: Any = _Log("busy", "wal")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        engines._prepare(hasty, "sqlite:///x.db", "rw", -1)
    network: Any = _Log("delete")
    with pytest.raises(
        StoreError, match=r"x\.db can't keep a write-ahead log \(journal mode delete"
    ):
        engines._prepare(network, "sqlite:///x.db", "rw", 5)
