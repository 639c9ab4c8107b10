"""SIGKILL of a real deliverer: nothing lost, nothing out of order, duplicates carry the same id."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.monitor.delivery.loopback import Receiver, Reply, Request, fire, rows, states, tell

from quantwatch.store.outbox import Event, publish
from quantwatch.store.session import Database

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("deliverer_process.py")
AFTER_LEASE_S = 200
Start = Callable[..., "subprocess.Popen[str]"]

pytestmark = pytest.mark.slow


@pytest.fixture
def start(db: Database, receiver: Receiver) -> Iterator[Start]:
    """Start a deliverer in its own process; all that still run are ended at the end, by pid."""
    running: list[subprocess.Popen[str]] = []

    def start_one(shift_s: int = 0, kill_point: str = "") -> "subprocess.Popen[str]":
        words = [sys.executable, str(SCRIPT), db.url, str(receiver.port), str(shift_s), kill_point]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )
        running.append(process)
        assert process.stdout is not None
        if not kill_point:
            assert process.stdout.readline() == "started\n"
        return process

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


def publish_three_each(db: Database) -> list[str]:
    """Two subjects, in turns."""
    found = []
    for number in range(3):
        for subject in ("a", "b"):
            kind = "alert.firing" if number == 0 else "alert.reminder"
            found.append(tell(db, kind, subject, alerts=[{"episode": subject}], number=number))
    return found


def finish(db: Database, receiver: Receiver, count: int) -> None:
    """Wait until so many messages have come in and all is written down."""
    done = threading.Event()
    for _ in range(600):
        if len(set(receiver.ids)) >= count and set(states(db)) == {"delivered"}:
            return
        done.wait(0.05)
    raise AssertionError(f"received {len(set(receiver.ids))} of {count}: {states(db)}")


def check(db: Database, receiver: Receiver, published: list[str]) -> None:
    """Nothing lost; in each subject, first arrivals in order; one body per id."""
    assert set(states(db)) == {"delivered"}
    first_arrivals = list(dict.fromkeys(receiver.ids))
    assert sorted(first_arrivals) == sorted(published)
    subjects = {row.event_id: row.subject for row in rows(db)}
    for subject in ("a", "b"):
        expected = [one for one in published if subjects[one] == subject]
        assert [one for one in first_arrivals if subjects[one] == subject] == expected
    assert len({(one.id, one.body) for one in receiver.requests}) == len(published)


def test_k8_killed_after_the_commit(db: Database, receiver: Receiver, start: Start) -> None:
    """Catches B21: a message that was committed and forgotten because its sender died."""
    process = start()
    published = []
    with db.writer() as session:
        for number in range(6):
            kind = "alert.firing" if number < 2 else "alert.reminder"
            event = Event(kind, "ab"[number % 2], {"type": kind, "data": {"number": number}})
            published.append(publish(session, event, ["hook"]))
        # We hold the database: it is stopped while it holds nothing, and before it can see these.
        process.send_signal(signal.SIGSTOP)
    process.kill()
    process.wait()
    assert receiver.requests == []
    start()
    finish(db, receiver, 6)
    check(db, receiver, published)
    assert len(receiver.requests) == 6


def test_k9_killed_before_the_answer(db: Database, receiver: Receiver, start: Start) -> None:
    """Catches a message that was on its way when its process died: it is sent again, same id."""
    arrived, release = threading.Event(), threading.Event()

    def answer(request: Request) -> Reply:
        if request.number == 2:
            arrived.set()
            release.wait(30)
        return Reply()

    receiver.answer = answer
    published = publish_three_each(db)
    process = start()
    assert arrived.wait(30)
    process.kill()
    process.wait()
    release.set()
    assert "sending" in states(db)
    start(AFTER_LEASE_S)
    finish(db, receiver, 6)
    check(db, receiver, published)
    assert receiver.ids.count(receiver.ids[2]) == 2


def test_k10_killed_after_the_answer(db: Database, receiver: Receiver, start: Start) -> None:
    """Catches a delivered message that is sent again under another id."""
    published = publish_three_each(db)
    process = start(kill_point="K10")
    assert process.wait(30) == -signal.SIGKILL
    assert len(receiver.requests) == 3
    start(AFTER_LEASE_S)
    finish(db, receiver, 6)
    check(db, receiver, published)
    assert receiver.ids.count(receiver.ids[2]) == 2


def test_two_deliverers_share_one_outbox(db: Database, receiver: Receiver, start: Start) -> None:
    """Catches B22: two senders that both send, or that break the order between them."""
    start()
    start()
    published = [fire(db, f"e{i}", subject="ab"[i % 2]) for i in range(40)]
    finish(db, receiver, 40)
    check(db, receiver, published)
    assert len(receiver.requests) == 40
