"""A verified copy of a database while it is in use."""

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import psycopg.conninfo
from sqlalchemy import URL

from quantwatch.errors import StoreError, UserError
from quantwatch.store.failures import clear_errors
from quantwatch.store.urls import SqliteFile, parse_url, shown


def backup(url: str, target: Path) -> None:
    """Copy the database to a new file and check the copy. Raises UserError if the file exists.

    SQLite becomes one SQLite file, PostgreSQL an archive for pg_restore (needs pg_dump).
    """
    parsed = parse_url(url)
    if target.exists():
        raise UserError(f"{target} exists already; a backup never overwrites, name a new file.")
    if not target.absolute().parent.is_dir():
        raise UserError(f"Folder {target.absolute().parent} does not exist; create it first.")
    partial = target.with_name(target.name + ".partial")
    copy = _copy_sqlite if parsed.get_backend_name() == "sqlite" else _dump_postgres
    try:
        copy(parsed, partial)
        # A hard link fails where a rename would replace a file that appeared meanwhile.
        os.link(partial, target)
    except OSError as error:
        raise StoreError(f"Backup to {target} failed: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)


def connection_words(url: URL) -> str:
    """Return where a PostgreSQL database is, as its programs take it; never a password."""
    place = {"host": url.host, "port": url.port, "user": url.username, "dbname": url.database}
    query = {key: str(value) for key, value in url.query.items() if key != "password"}
    given = {key: value for key, value in place.items() if value} | query
    return psycopg.conninfo.make_conninfo("", **given)


def secrets_of(url: URL) -> dict[str, str]:
    """Return the environment of PostgreSQL's programs: other users can read a command line."""
    secret = url.password or url.query.get("password")
    return {"PGPASSWORD": str(secret)} if secret else {}


def _copy_sqlite(url: URL, target: Path) -> None:
    file = SqliteFile.of(url)
    if not file.path.exists():
        raise StoreError(f"Database {shown(url)} does not exist; there is nothing to back up.")
    target.unlink(missing_ok=True)
    with (
        clear_errors(shown(url)),
        closing(sqlite3.connect(file.uri("ro"), uri=True)) as source,
        closing(sqlite3.connect(target)) as copy,
    ):
        source.backup(copy)
        # One self-contained file, with no log beside it.
        copy.execute("PRAGMA journal_mode = DELETE")
        found = [row[0] for row in copy.execute("PRAGMA integrity_check")]
        if found != ["ok"]:
            raise StoreError(f"Database {shown(url)} is damaged, its copy was dropped: {found[0]}.")


def _dump_postgres(url: URL, target: Path) -> None:
    program = shutil.which("pg_dump")
    if program is None:
        raise StoreError(
            f"Database {shown(url)} needs pg_dump for a backup; install PostgreSQL's client tools."
        )
    command = [program, "--format=custom", "--no-password", f"--file={target}"]
    command += [f"--dbname={connection_words(url)}"]
    environment = os.environ | secrets_of(url)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise StoreError(f"Backup of {shown(url)} failed: {lines[0]}.")
    with target.open("rb") as archive:
        start = archive.read(5)
    if start != b"PGDMP":
        raise StoreError(f"Backup of {shown(url)} failed: pg_dump wrote no archive.")
