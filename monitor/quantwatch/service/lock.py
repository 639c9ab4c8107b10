"""One scheduler per SQLite file: an operating system lock, let go when the process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantwatch.errors import StoreError
from quantwatch.store.session import Database
from quantwatch.store.urls import SqliteFile, parse_url


@contextmanager
def only_scheduler(db: Database) -> Iterator[None]:
    """Hold `<database>.scheduler.lock` in the body; a PostgreSQL server needs none.

    SQLite means one host, where a second scheduler is a mistake: the slot's UNIQUE key keeps it
    harmless, but nobody would know which one schedules. Raises StoreError naming its process.
    """
    url = parse_url(db.url)
    if url.get_backend_name() != "sqlite":
        yield
        return
    file = SqliteFile.of(url).path
    path = file.with_name(f"{file.name}.scheduler.lock")
    with _opened(path, db.name) as handle:
        _take(handle, path, db.name)
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        # The file stays: whoever removed it would let two processes lock two files of one name.
        yield


@contextmanager
def _opened(path: Path, name: str) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(f"Database {name}: {path} can't be written: {error.strerror}.") from error
    try:
        yield handle
    finally:
        os.close(handle)


def _take(handle: int, path: Path, name: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise StoreError(
            f"Database {name} has a scheduler already (process {holder}, {path}); stop it, or "
            "start this one with --standby."
        ) from None
