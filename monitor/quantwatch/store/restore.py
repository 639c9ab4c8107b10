"""A backup becomes a database again: only where there is none yet, and checked before it counts."""

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from sqlalchemy import URL

from quantwatch.errors import StoreError, UserError
from quantwatch.store.backup import connection_words, secrets_of
from quantwatch.store.failures import clear_errors
from quantwatch.store.schema import SchemaState
from quantwatch.store.upgrade import schema_state
from quantwatch.store.urls import SqliteFile, parse_url, shown

_ARCHIVE = b"PGDMP"
_SQLITE = b"SQLite format 3\0"


def restore(url: str, source: Path) -> SchemaState:
    """Fill a database that is empty or not there yet from a backup.

    Return the state of its schema: a backup of an older quantwatch is `behind`. Raises UserError
    when the file is no backup of this kind of database, StoreError when it is damaged or the
    database holds anything.
    """
    parsed = parse_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    _require_backup(source, is_sqlite, shown(parsed))
    if (state := schema_state(url)) != "empty":
        raise StoreError(
            f"Database {shown(parsed)} holds data already ({state} schema); a backup is restored "
            "into a new or empty database only."
        )
    if is_sqlite:
        _copy_sqlite(parsed, source)
    else:
        _restore_postgres(parsed, source)
    return schema_state(url)


def _require_backup(source: Path, is_sqlite: bool, name: str) -> None:
    try:
        with source.open("rb") as file:
            start = file.read(len(_SQLITE))
    except OSError as error:
        raise UserError(f"{source}: can't be read: {error.strerror}.") from error
    wanted = _SQLITE if is_sqlite else _ARCHIVE
    if not start.startswith(wanted):
        kind = "a SQLite file" if is_sqlite else "an archive of pg_dump"
        raise UserError(f"{source} can't be restored into {name}: it is not {kind}.")


def _copy_sqlite(url: URL, source: Path) -> None:
    target = SqliteFile.of(url).path
    if not target.parent.is_dir():
        raise UserError(f"Folder {target.parent} does not exist; create it first.")
    partial = target.with_name(target.name + ".partial")
    try:
        _verified_copy(source, partial)
        if target.exists() and target.stat().st_size > 0:
            raise StoreError(f"Database {shown(url)} is no empty file; nothing was restored.")
        _require_no_log(target, shown(url))
        with partial.open("rb") as copy:
            os.fsync(copy.fileno())
        os.replace(partial, target)
    except OSError as error:
        raise StoreError(f"Restoring {shown(url)} failed: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)


def _require_no_log(target: Path, name: str) -> None:
    """A log left by a database that is gone would be replayed over the restored one."""
    left = [target.with_name(target.name + end) for end in ("-wal", "-shm", "-journal")]
    if found := [str(path) for path in left if path.exists()]:
        raise StoreError(
            f"Database {name}: {found[0]} is left of a database that is gone and would be replayed "
            "over the restored one; move it away (it may hold what the file did not), then again."
        )


def _verified_copy(source: Path, target: Path) -> None:
    """Copy a backup page by page and check every page and every reference of the copy."""
    target.unlink(missing_ok=True)
    with (
        clear_errors(str(source)),
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as backup,
        closing(sqlite3.connect(target)) as copy,
    ):
        backup.backup(copy)
        damage = [row[0] for row in copy.execute("PRAGMA integrity_check") if row[0] != "ok"]
        broken = copy.execute("PRAGMA foreign_key_check").fetchall()
    if damage or broken:
        what = damage[0] if damage else f"{len(broken)} rows refer to nothing"
        raise StoreError(f"{source} is damaged, nothing was restored: {what}.")


def _restore_postgres(url: URL, source: Path) -> None:
    program = shutil.which("pg_restore")
    if program is None:
        raise StoreError(
            f"Database {shown(url)} needs pg_restore; install PostgreSQL's client tools."
        )
    # One transaction: a backup that breaks off leaves the database as empty as before.
    command = [program, "--exit-on-error", "--single-transaction", "--no-owner", "--no-password"]
    command += [f"--dbname={connection_words(url)}", str(source)]
    environment = os.environ | secrets_of(url)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise StoreError(f"Restoring {shown(url)} failed: {lines[0]}.")
