"""The idempotency stores that are compared, each with the same work: queue one run."""

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import delete, func, select

from quantwatch.store import triggers
from quantwatch.store.queue import NewRun, enqueue
from quantwatch.store.session import Database
from quantwatch.store.tables import RunRow, TriggerRow
from quantwatch.store.triggers import trigger
from quantwatch.telemetry import new_run_id

PENDING = "pending"
Hook = Callable[[], None]


def nothing() -> None:
    pass


class Memory:
    """Keys of one process."""

    def __init__(self, db: Database, ttl_s: float = 60.0) -> None:
        self.db, self.ttl_s = db, ttl_s
        self.lock, self.kept = threading.Lock(), dict[str, tuple[float, str]]()

    def request(self, key: str, between: Hook = nothing) -> None:
        """Queue a run unless the key is known; `between` comes after the work, before its note."""
        with self.lock:
            expires, _ = self.kept.get(key, (0.0, ""))
            if expires > time.monotonic():
                return
            self.kept[key] = (time.monotonic() + self.ttl_s, PENDING)
        queue_run(self.db)
        between()
        with self.lock:
            self.kept[key] = (time.monotonic() + self.ttl_s, "done")


class Redis:
    """Keys of a server."""

    def __init__(self, db: Database, port: int, ttl_s: float = 60.0) -> None:
        self.db, self.port, self.ttl = db, port, str(int(ttl_s * 1000))
        self.local = threading.local()

    def request(self, key: str, between: Hook = nothing) -> None:
        """Queue a run unless the key is known; `between` comes after the work, before its note."""
        if self.say("SET", key, PENDING, "NX", "PX", self.ttl) is None:
            return
        queue_run(self.db)
        between()
        self.say("SET", key, "done", "PX", self.ttl)

    def say(self, *words: str) -> str | None:
        """Send a command and return the simple or bulk answer."""
        if not hasattr(self.local, "file"):
            connection = socket.create_connection(("127.0.0.1", self.port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.local.file = connection.makefile("rwb")
        file = self.local.file
        parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        file.write(f"*{len(words)}\r\n{parts}".encode())
        file.flush()
        line: str = file.readline().decode().strip()
        if line.startswith("$") and line != "$-1":
            return str(file.readline().decode().strip())
        return None if line == "$-1" else line


class Sql:
    """Keys in the transaction that queues the run."""

    def __init__(self, db: Database, *, inside: bool = False) -> None:
        self.db, self.inside = db, inside

    def request(self, key: str, between: Hook = nothing) -> None:
        """Queue a run unless the key is known; `between` comes after the commit, or before it."""
        if not self.inside:
            trigger(self.db, new_run(), actor="benchmark", key=key)
            between()
            return
        with self.db.writer() as session:
            triggers._once(session, new_run(), "benchmark", key)
            between()


Store = Memory | Redis | Sql


def new_run() -> NewRun:
    return NewRun("nightly", f"m:{new_run_id()}", {}, "/", "manual")


def queue_run(db: Database) -> None:
    with db.writer() as session:
        enqueue(session, new_run())


def count_and_forget(db: Database) -> int:
    with db.writer() as session:
        count = session.scalar(select(func.count()).select_from(RunRow)) or 0
        session.execute(delete(TriggerRow))
        session.execute(delete(RunRow))
    return count


@contextmanager
def server(
    program: str, folder: Path, port: int, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Redis server on 127.0.0.1 until the end of the body, or until it is killed there."""
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    process = subprocess.Popen([program, *where, *options], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the Redis server did not start"
            time.sleep(0.05)
    yield process
    process.kill()
    process.wait()
