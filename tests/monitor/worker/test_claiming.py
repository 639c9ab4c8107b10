"""A run is claimed once, by one worker, on a free device, when its time has come."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from quantwatch.domain import RunStatus
from quantwatch.store import clock, leases
from quantwatch.store.attempts import Failure, WorkerId, list_attempts
from quantwatch.store.endings import fail
from quantwatch.store.leases import Claim, find_claim
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, DeviceSlotRow

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]

DEVICES = ("cpu", "cuda:0", "cuda:1", "mps")
OVER = Failure("internal", "over", "Done")


def try_claim(db: Database, devices: tuple[str, ...] = ("cpu",), host: str = "alpha") -> str | None:
    with db.writer() as session:
        claim = leases.claim(session, WorkerId("w", host, 1), devices)
    return None if claim is None else claim.run_id


def test_nothing_waits(db: Database) -> None:
    """Catches a worker that invents work."""
    assert try_claim(db) is None


def test_the_oldest_goes_first(db: Database, queue: Queue, take: Take) -> None:
    """Catches a run that waits for ever behind newer ones."""
    first, second = queue("a"), queue("b")

    claim = take()
    assert (first, "a") == (claim.run_id, claim.check)
    fail(db, claim, OVER)
    assert second == take().run_id


def test_what_a_claim_writes(db: Database, queue: Queue, peek: Peek) -> None:
    """Catches a lease that is not the database's clock, an attempt that isn't kept."""
    run_id = queue(deadline_s=600.0, config={"threads": 1}, base_dir="/etc/quantwatch")
    db.clock_shift = timedelta(days=3)
    with db.writer() as session:
        before = clock.now(session)
        claim = leases.claim(session, WorkerId("w1", "alpha", 7), ["cpu"], lease_s=120)
    assert claim is not None

    names = "status", "attempt", "lease_token", "lease_until", "deadline_at", "started_at"
    status, attempt, token, until, deadline, started = peek(run_id, *names)
    assert (RunStatus.CLAIMED, 1, claim.token) == (status, attempt, token)
    assert ((until - started).total_seconds(), (deadline - started).total_seconds()) == (120, 600)
    assert before <= started <= before + timedelta(seconds=5)
    assert (claim.config, claim.base_dir) == ({"threads": 1}, "/etc/quantwatch")
    (kept,) = list_attempts(db, run_id)
    assert (
        kept.number,
        kept.worker,
        kept.host,
        kept.pid,
        kept.outcome,
    ) == (1, "w1", "alpha", 7, None)
    assert claim == find_claim(db, run_id, claim.token)


def test_a_run_waits_until_its_time(db: Database, queue: Queue) -> None:
    """Catches a retry that doesn't wait, and one that waits by this machine's clock."""
    with db.reader() as session:
        later = clock.now(session) + timedelta(minutes=5)
    run_id = queue(not_before=later)

    db.clock_shift = timedelta(minutes=4)
    assert try_claim(db) is None
    db.clock_shift = timedelta(minutes=5)
    assert run_id == try_claim(db)


def test_a_check_in_quarantine_is_passed_over(db: Database, queue: Queue) -> None:
    """Catches a poison run that kills one worker after the other."""
    queue("poison")
    healthy = queue("healthy")
    with db.writer() as session:
        apart = update(CheckRow).where(CheckRow.name == "poison")
        session.execute(apart.values(quarantined_at=clock.now(session)))

    assert healthy == try_claim(db)
    assert try_claim(db, ("cpu", "cuda:0")) is None


def test_one_run_per_device(db: Database, queue: Queue, take: Take) -> None:
    """Catches two runs that disturb each other's measurement (F11)."""
    first, second = queue(), queue()
    on_gpu = queue(device="cuda:0")

    claim = take()
    assert first == claim.run_id
    assert try_claim(db) is None, "cpu is taken"
    assert on_gpu == try_claim(db, ("cpu", "cuda:0"))
    assert second == try_claim(db, host="beta"), "another host has a CPU of its own"
    fail(db, claim, OVER)
    third = queue()
    assert third == try_claim(db), "the device is free again"


def test_a_worker_takes_only_what_it_has(db: Database, queue: Queue) -> None:
    """Catches a GPU check on a machine without one."""
    queue(device="cuda:0")
    assert try_claim(db, ("cpu", "mps")) is None


def test_attempts_count_on(db: Database, queue: Queue, take: Take) -> None:
    """Catches a second attempt that takes the first one's row or token."""
    run_id = queue()
    first = take()
    fail(db, first, Failure("oom", "no memory", "MemoryError", retryable=True))
    db.clock_shift = timedelta(minutes=2)
    second = take("w2")

    assert (first.attempt, second.attempt) == (1, 2)
    assert first.token != second.token
    assert [attempt.number for attempt in list_attempts(db, run_id)] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("num_runs", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_four_workers_claim_each_run_once(db: Database, queue: Queue, num_runs: int) -> None:
    """Catches a run that two workers carry out, or that nobody does (B01, X5)."""
    wanted = {queue(f"check-{i % 7}", device=DEVICES[i % 4]) for i in range(num_runs)}
    claimed: Counter[str] = Counter()
    together = threading.Barrier(4)
    crowded: list[int] = []

    def work(number: int) -> None:
        together.wait()
        me = WorkerId(f"w{number}", "alpha", number)
        while True:
            with db.writer() as session:
                claim = leases.claim(session, me, DEVICES)
                slots = session.scalar(select(func.count()).select_from(DeviceSlotRow))
            if claim is None and len(claimed) == num_runs:
                return
            if claim is None:
                threading.Event().wait(0.01)
                continue
            claimed[claim.run_id] += 1
            crowded.append(slots or 0)
            fail(db, claim, OVER)

    with db.kept_open(), ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, number) for number in range(4)]:
            done.result(timeout=300)
    assert wanted == set(claimed)
    assert {1} == set(claimed.values())
    assert max(crowded) <= len(DEVICES)
    with db.reader() as session:
        assert session.scalar(select(func.count()).select_from(DeviceSlotRow)) == 0
