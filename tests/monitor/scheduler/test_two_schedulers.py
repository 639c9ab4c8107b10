"""Several schedulers on one database, and one that is killed: every slot exactly once."""

import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from quantwatch.scheduler import Scheduler
from quantwatch.store.session import Database, open_database

CHECKS, HOURS = 20, 10
HOURLY = {f"check-{i}": {"cron": f"{i + 1} * * * *"} for i in range(CHECKS)}


def all_slots(place: Any) -> list[str]:
    return [f"{name} {slot}" for name in HOURLY for slot, _ in place.slots(name)]


def split_brain(place: Any) -> tuple[Scheduler, Scheduler]:
    """Return two schedulers that both believe to lead: the first one's clock stands still."""
    second_db = open_database(place.db.url, wait_s=20)
    first = Scheduler(place.db, holder="a", monotonic=lambda: 0.0)
    first.tick()
    place.set_clock(place.start + timedelta(seconds=45))
    second_db.clock_shift = place.db.clock_shift
    second = Scheduler(second_db, holder="b", monotonic=lambda: 0.0)
    second.tick()
    assert first.is_leader
    assert second.is_leader
    return first, second


@pytest.mark.parametrize("hours", [2, pytest.param(HOURS, marks=pytest.mark.slow)])
def test_two_leaders_on_200_slots(hours: int, place: Any, db: Database) -> None:
    """B01, X5: both look at the same checks at the same time; each slot is dealt with once."""
    place.apply(**HOURLY)
    schedulers = split_brain(place)
    moved: list[float] = []
    meet = threading.Barrier(2, timeout=60)

    def work(scheduler: Scheduler) -> None:
        for hour in range(1, hours + 1):
            if meet.wait() == 0:
                place.set_clock(place.start + timedelta(hours=hour, minutes=-1))
                schedulers[1]._db.clock_shift = db.clock_shift
                place.end_runs()
                moved.append(hour)
            meet.wait()
            scheduler.tick()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, each) for each in schedulers]:
            done.result()
    assert len(moved) == hours
    assert Counter(all_slots(place)).most_common(1)[0][1] == 1
    assert len(all_slots(place)) == CHECKS * hours
    assert {word for name in HOURLY for _, word in place.slots(name)} <= {"queued", "failed"}
    schedulers[1]._db.close()


_RACER = """
import sys
from datetime import timedelta
from quantwatch.scheduler import Scheduler
from quantwatch.store.session import open_database
db = open_database(sys.argv[1], wait_s=60)
scheduler = Scheduler(db)
scheduler._leadership.hold = lambda: True  # the optimisation is what must not be needed
print("ready", flush=True)
sys.stdin.readline()
for hour in range(1, 11):
    db.clock_shift = timedelta(seconds=float(sys.argv[2]) + hour * 3600)
    scheduler.tick()
db.close()
"""


@pytest.mark.slow
def test_four_processes_on_200_slots(place: Any, db: Database) -> None:
    """B01: four processes without any leader race through ten hours; nobody fails, no slot twice."""
    place.apply(**HOURLY)
    Scheduler(db).tick()
    shift = str(db.clock_shift.total_seconds() - 60)
    racers = [_child(_RACER, db.url, shift) for _ in range(4)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    ends = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        _, said = racer.communicate(timeout=240)
        ends.append((racer.returncode, "Traceback" in said))
    assert ends == [(0, False)] * 4, said
    slots = all_slots(place)
    assert len(slots) == len(set(slots)) == CHECKS * HOURS


_KILLED = """
import os, signal, sys
from datetime import timedelta
from quantwatch.scheduler import Scheduler, step
from quantwatch.store import queue
from quantwatch.store.session import open_database
db = open_database(sys.argv[1])
db.clock_shift = timedelta(seconds=float(sys.argv[2]))
enqueue, calls = queue.enqueue, []
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def after_insert(session, new):
    assert enqueue(session, new)
    die()
def before_second(session, new):
    calls.append(new)
    return die() if len(calls) == 2 else enqueue(session, new)
def nothing(*_): pass
{plant}
Scheduler(db).tick()
"""
KILLS = {
    "K1 after the insert, before the commit": ("queue.enqueue = after_insert", 0),
    "K2 after the commit, before it is counted": ("step.count = die", 1),
    "K13 between two checks": ("queue.enqueue = before_second", 1),
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_scheduler(kill: str, place: Any, db: Database) -> None:
    """§7.4: SIGKILL loses no slot and doubles none; the lease of the dead keeps others waiting 30 s."""
    plant, survived = KILLS[kill]
    names = ("alpha", "beta", "gamma")
    place.apply(**{name: {"cron": "0 13 * * *"} for name in names})
    place.set_clock(place.start + timedelta(hours=1))
    child = _child(_KILLED.replace("{plant}", plant), db.url, str(db.clock_shift.total_seconds()))
    _, said = child.communicate(timeout=60)
    assert child.returncode == -9, said
    assert sum(len(place.slots(name)) for name in names) == survived
    next_one = Scheduler(db)
    assert next_one.tick() == 0
    assert sum(len(place.slots(name)) for name in names) == survived
    place.set_clock(place.start + timedelta(hours=1, minutes=5))
    next_one.tick()
    assert [place.slots(name) for name in names] == [[("2026-03-27T13:00:00Z", "queued")]] * 3
    next_one.tick()
    assert sum(len(place.slots(name)) for name in names) == 3


def _child(script: str, url: str, shift: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, url, shift],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
