"""What an idempotency key is worth in memory, in Redis and in our SQL transaction. Prints JSON.

A request queues one run; the same request comes again. Counted are the runs that the database then
holds: 1 is right, 2 is a double execution, 0 a lost one.

- memory: a dict with a lock and an expiry per key, in the process;
- redis: SET key NX PX, work, SET key result PX, on a server of --redis, spoken to over a socket;
- sql: `store.triggers.trigger`: the key and the run are written in one transaction.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from idempotency_stores import (
    Hook,
    Memory,
    Redis,
    Sql,
    Store,
    count_and_forget,
    nothing,
    server,
)

from quantwatch.store.session import Database, open_database
from quantwatch.store.upgrade import upgrade

KEY = "nightly-2026-11-29"


def latency(store: Store, count: int) -> dict[str, float]:
    """Milliseconds of first uses and of repetitions."""
    found: dict[str, float] = {}
    for name in ("first", "again"):
        times = []
        for i in range(count):
            began = time.perf_counter()
            store.request(f"latency-{i}")
            times.append((time.perf_counter() - began) * 1000)
        p50, p95 = np.percentile(times, [50, 95])
        found |= {f"{name}_ms_p50": round(float(p50), 3), f"{name}_ms_p95": round(float(p95), 3)}
    return found


def at_once(store: Store, db: Database) -> int:
    """Runs after eight threads used one key at the same moment."""
    barrier = threading.Barrier(8)

    def use() -> None:
        barrier.wait()
        store.request("eight at once")

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count_and_forget(db)


def expired_while_working(make: Callable[[float], Store], db: Database) -> int:
    """Runs when the request is repeated while the first is still at work, after its expiry."""
    store = make(0.05)

    def again() -> None:
        time.sleep(0.2)
        store.request("slow work")

    store.request("slow work", again)
    return count_and_forget(db)


def killed(kind: str, url: str, port: int, db: Database, wait_s: float = 0.0) -> int:
    """Runs after a process was killed between its work and the note of it, and asked again."""
    for hook in ("kill", "nothing"):
        command = [sys.executable, __file__, "--child", kind, url, str(port), hook]
        done = subprocess.run(command, check=False)
        assert done.returncode == (-signal.SIGKILL if hook == "kill" else 0)
        time.sleep(wait_s)
    return count_and_forget(db)


def child(kind: str, url: str, port: str, hook: str) -> None:
    """Make one request with keys that are kept for a second, and die at the hook if asked to."""
    db = open_database(url)
    makers: dict[str, Callable[[], Store]] = {
        "memory": lambda: Memory(db, 1.0),
        "redis": lambda: Redis(db, int(port), 1.0),
        "sql": lambda: Sql(db),
        "sql inside": lambda: Sql(db, inside=True),
    }
    die: Hook = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    makers[kind]().request(KEY, die if hook == "kill" else nothing)


def restarted(program: str, db: Database, port: int, *options: str) -> int:
    """Runs when the Redis server is killed and started again between a request and the next."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with server(program, Path(folder), port, *options):
                Redis(db, port).request(KEY)
    return count_and_forget(db)


def measure(program: str | None, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        url = f"sqlite:///{name}/keys.db"
        upgrade(url)
        db = open_database(url)
        found = {
            "memory": judged(lambda ttl: Memory(db, ttl), db, count),
            "sql": judged(lambda _: Sql(db), db, count),
        }
        found["memory"]["runs_killed_before_the_note"] = killed("memory", url, 0, db)
        found["sql"]["runs_killed_before_the_commit"] = killed("sql inside", url, 0, db)
        found["sql"]["runs_killed_after_the_commit"] = killed("sql", url, 0, db)
        if program is not None:
            found["redis"] = _of_redis(program, db, url, count)
        db.close()
    return found


def judged(make: Callable[[float], Store], db: Database, count: int) -> dict[str, Any]:
    """What is asked of every store; `make` takes how many seconds it keeps a key."""
    found: dict[str, Any] = latency(make(60.0), count)
    count_and_forget(db)
    found["runs_eight_at_once"] = at_once(make(60.0), db)
    found["runs_expired_while_working"] = expired_while_working(make, db)
    return found


def _of_redis(program: str, db: Database, url: str, count: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, server(program, Path(folder), port):
        found = judged(lambda ttl: Redis(db, port, ttl), db, count)
        found["runs_killed_before_the_note"] = killed("redis", url, port, db, wait_s=1.2)
    for name, options in {
        "defaults": (),
        "appendfsync_everysec": ("--appendonly", "yes"),
        "appendfsync_always": ("--appendonly", "yes", "--appendfsync", "always"),
    }.items():
        found[f"runs_server_killed_{name}"] = restarted(program, db, port, *options)
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--redis", help="A redis-server program; without it Redis is left out.")
    parser.add_argument("--count", type=int, default=300)
    options = parser.parse_args()
    print(json.dumps(measure(options.redis, options.count), indent=1))


if __name__ == "__main__":
    main()
