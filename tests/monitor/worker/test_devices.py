"""Runs on several devices, and runs on devices that nobody has."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from quantwatch.domain import RunStatus
from quantwatch.store import clock, leases, slots
from quantwatch.store.attempts import Failure, WorkerId
from quantwatch.store.components import Component, note_seen
from quantwatch.store.endings import Trouble, fail
from quantwatch.store.leases import Claim
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, DeviceSlotRow
from quantwatch.store.unclaimed import expire
from quantwatch.worker import Worker

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
BOTH = "cuda:0,cuda:1"
GPUS = ("cuda:0", "cuda:1")
OVER = Failure("internal", "over", "Done")


def claim_one(db: Database, *devices: str) -> Claim | None:
    with db.writer() as session:
        return leases.claim(session, WorkerId("w", "alpha", 1), devices)


def try_claim(db: Database, *devices: str) -> str | None:
    claim = claim_one(db, *devices)
    return None if claim is None else claim.run_id


def taken(db: Database) -> list[str]:
    with db.reader() as session:
        return sorted(session.scalars(select(DeviceSlotRow.device)))


def test_a_run_takes_all_its_devices(db: Database, queue: Queue, take: Take) -> None:
    """Catches two runs on one GPU: the candidate's is as busy as the reference's (F11)."""
    queue(device=BOTH)
    other = queue(device="cuda:1")
    held = take(devices=("cuda:0", "cuda:1"))

    assert taken(db) == ["alpha/cuda:0", "alpha/cuda:1"]
    assert try_claim(db, "cuda:0", "cuda:1") is None
    fail(db, held, OVER)
    assert taken(db) == []
    assert try_claim(db, "cuda:0", "cuda:1") == other


def test_a_worker_without_one_of_them_passes(db: Database, queue: Queue) -> None:
    """Catches a run that is begun where it can't be carried out."""
    both, one = queue(device=BOTH), queue(device="cuda:0")
    assert try_claim(db, "cuda:0", "cpu") == one
    assert try_claim(db, "cuda:0", "cuda:1") is None, "cuda:0 is in use"
    assert both


def test_a_run_gets_all_or_nothing(
    db: Database, queue: Queue, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a device that stays taken because another worker was a moment faster."""
    queue(device="cuda:1")
    take(devices=("cuda:1",))
    queue(device=BOTH)
    monkeypatch.setattr(slots, "free_needs", lambda *_: [BOTH])

    assert try_claim(db, "cuda:0", "cuda:1") is None
    assert taken(db) == ["alpha/cuda:1"]


def test_a_run_on_two_devices_is_not_overtaken(db: Database, queue: Queue, take: Take) -> None:
    """Catches a run on two GPUs that starves while runs on one of them take turns."""
    queue(device="cuda:0")
    first = take(devices=GPUS)
    both = queue(device=BOTH)
    younger = {queue(device=f"cuda:{number % 2}") for number in range(4)}

    assert try_claim(db, *GPUS) is None, "the older one waits for cuda:0"
    fail(db, first, OVER)
    held = take(devices=GPUS)
    assert held.run_id == both
    fail(db, held, OVER)
    assert {try_claim(db, *GPUS), try_claim(db, *GPUS)} < younger
    assert taken(db) == ["alpha/cuda:0", "alpha/cuda:1"]


def test_runs_take_turns_by_age(db: Database, queue: Queue, take: Take) -> None:
    """Catches starvation with any mixture: every claim is the oldest that is not blocked."""
    needs = [*("cuda:0", BOTH, "cuda:1", "cuda:0", BOTH, "cpu", "cuda:1,cuda:2"), "cuda:2", BOTH]
    ids = [queue(device=need) for need in needs]
    order: list[str] = []
    holding: list[Claim] = []
    while len(order) < len(ids):
        if try_one := claim_one(db, *GPUS, "cuda:2", "cpu"):
            holding.append(try_one)
            order.append(try_one.run_id)
        else:
            fail(db, holding.pop(0), OVER)
    starts = [ids.index(run_id) for run_id in order]
    for number, need in enumerate(needs):
        before = starts[: starts.index(number)]
        passed_by = [other for other in before if other > number]
        assert not [other for other in passed_by if shares(needs[other], need)], number


def shares(one: str, other: str) -> bool:
    return not set(one.split(",")).isdisjoint(other.split(","))


@pytest.mark.parametrize("why", ["later", "quarantined", "elsewhere"])
def test_who_cannot_start_keeps_nobody_waiting(
    db: Database, queue: Queue, take: Take, why: str
) -> None:
    """Catches GPUs that are kept free for a run that nobody may start here."""
    queue(device="cuda:0")
    take(devices=GPUS)
    with db.reader() as session:
        later = clock.now(session) + timedelta(hours=1)
    both = {"later": BOTH, "quarantined": BOTH, "elsewhere": "cuda:1,cuda:7"}[why]
    queue("apart", device=both, not_before=later if why == "later" else None)
    if why == "quarantined":
        with db.writer() as session:
            session.execute(
                update(CheckRow).where(CheckRow.name == "apart").values(quarantined_at=later)
            )
    younger = queue(device="cuda:1")
    assert try_claim(db, *GPUS) == younger


# devices that nobody has


@pytest.fixture
def look(db: Database) -> Callable[..., list[Trouble]]:
    """Move the clock, let workers with these devices be seen, and expire."""

    def at(hours: float, *workers: tuple[str, ...]) -> list[Trouble]:
        db.clock_shift = timedelta(hours=hours)
        with db.writer() as session:
            for number, devices in enumerate(workers):
                part = Component(f"w{number}", "worker", "alpha", 1)
                note_seen(session, part, {"devices": list(devices)})
        return expire(db)

    return at


def test_a_run_that_nobody_can_take_fails(
    db: Database, queue: Queue, peek: Peek, look: Callable[..., list[Trouble]]
) -> None:
    """Catches a check that waits in the queue for ever without a word."""
    run_id, other = queue(device=BOTH), queue(device="cpu")
    assert look(5.9, ("cpu",), ("cuda:0",)) == []
    (trouble,) = look(6.1, ("cpu",), ("cuda:0",))

    assert (trouble.run_id, trouble.status) == (run_id, RunStatus.FAILED)
    status, code, text = peek(run_id, "status", "reason_code", "reason_text")
    assert (status, code) == (RunStatus.FAILED, "gpu_unavailable")
    assert "no worker that is alive has cuda:0 and cuda:1" in text
    assert peek(other, "status") == RunStatus.QUEUED
    assert look(6.2, ("cpu",)) == []


def test_a_device_that_is_only_busy_is_waited_for(
    queue: Queue, look: Callable[..., list[Trouble]]
) -> None:
    """Catches a long queue that is taken for a missing GPU."""
    queue(device=BOTH)
    assert look(48, ("cuda:0", "cuda:1")) == []


def test_a_worker_that_is_gone_offers_nothing(
    queue: Queue, look: Callable[..., list[Trouble]]
) -> None:
    """Catches a host that was taken away, and whose row is still there."""
    queue(device="cuda:0")
    assert look(6.5, ("cuda:0",)) == []
    assert len(look(7)) == 1


def test_a_schedule_says_how_long(queue: Queue, look: Callable[..., list[Trouble]]) -> None:
    """Catches a run that starts long after its grace."""
    queue(device="cuda:0", config={"schedule": {"grace": "30m"}})
    assert look(0.4, ("cpu",)) == []
    assert len(look(0.6, ("cpu",))) == 1


def test_a_worker_looks_for_them(db: Database, queue: Queue, peek: Peek) -> None:
    """Catches a rule that nobody applies."""
    run_id = queue(device="cuda:7")
    db.clock_shift = timedelta(hours=7)

    def never(_: Claim) -> Any:
        raise AssertionError("nothing to carry out")

    Worker(db, never, devices=("cpu",))._look_around()
    assert peek(run_id, "status", "reason_code") == (RunStatus.FAILED, "gpu_unavailable")
