"""The deliverer against receivers that are down, slow or broken: the faults of issue 3."""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import psutil
import pytest
from prometheus_client import generate_latest
from tests.monitor.delivery.loopback import (
    Receiver,
    Reply,
    Request,
    attempts,
    client,
    endpoint_to,
    fire,
    health_of,
    later,
    resolve,
    rows,
    states,
    tell,
    to_next,
)

from quantwatch.delivery.loop import Deliverer
from quantwatch.observability import meters
from quantwatch.store.failed_tasks import list_failed
from quantwatch.store.outbox import Event, publish
from quantwatch.store.session import Database

Start = Callable[[], Receiver]


def deliverer(db: Database, *receivers: Receiver, **fields: object) -> Deliverer:
    """One endpoint per receiver: hook, hook1, …"""
    names = ["hook", *(f"hook{i}" for i in range(1, len(receivers)))]
    known = {
        name: endpoint_to(one.port, name, **fields)
        for name, one in zip(names, receivers, strict=True)
    }
    return Deliverer(db, known, client())


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    until, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        pause.wait(0.02)


def test_down_for_a_day_loses_nothing(db: Database, receiver: Receiver) -> None:
    """Catches X25: a receiver that is down for 24 h gets everything afterwards, in order."""
    receiver.statuses(500)
    one = deliverer(db, receiver)
    sent = [fire(db, "e1", subject="a")]
    start = rows(db)[0].created_at
    while (rows(db)[0].next_at - start).total_seconds() < 24 * 3600:
        one.run_once()
        to_next(db)
    sent.append(tell(db, "alert.escalated", "a", alerts=[{"episode": "e1"}]))
    before = len(receiver.requests)
    receiver.statuses(200)
    one.run_once()
    to_next(db)
    one.run_once()
    assert set(states(db)) == {"delivered"}
    assert receiver.ids[before:] == sent
    assert {row.state for row in rows(db)} == {"delivered"}
    assert list_failed(db) == []


def test_slow_receiver_delays_nobody(db: Database, receivers: Start) -> None:
    """Catches X27: a slow channel before which the others queue."""
    slow, fast = receivers(), receivers()
    release = threading.Event()

    def hang(_request: Request) -> Reply:
        release.wait(20)
        return Reply()

    slow.answer = hang
    known = {"hook": endpoint_to(slow.port), "hook1": endpoint_to(fast.port, "hook1")}
    one = Deliverer(db, known, client(total_s=20.0))
    for number in range(5):
        fire(db, f"e{number}", subject=f"s{number}", endpoints=("hook", "hook1"))
    one.start()
    try:
        wait_for(lambda: len(fast.requests) == 5 and len(slow.requests) == 1)
        assert len(slow.requests) == 1
    finally:
        release.set()
        assert one.stop(20)


def cut_off(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")


def silence(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.settimeout(5)
    handler.connection.recv(1)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply(500), id="500"),
        pytest.param(Reply(429, {"retry-after": "7"}), id="429-retry-after"),
        pytest.param(Reply(302, {"location": "http://127.0.0.1:1/"}), id="redirect"),
        pytest.param(Reply(misbehave=cut_off), id="cut-off"),
        pytest.param(Reply(misbehave=silence), id="accepts-then-silent"),
    ],
)
def test_fault_then_recovery(sqlite_db: Database, receiver: Receiver, reply: Reply) -> None:
    """Catches a fault after which a message is lost, out of order or under another id."""
    receiver.answer = lambda request: reply if request.number < 2 else Reply()
    one = Deliverer(sqlite_db, {"hook": endpoint_to(receiver.port)}, client(total_s=0.5))
    published = [fire(sqlite_db, "e1"), tell(sqlite_db, "alert.reminder", alerts=[])]
    for _ in range(6):
        one.run_once()
        to_next(sqlite_db)
    assert set(states(sqlite_db)) == {"delivered"}
    assert list(dict.fromkeys(receiver.ids)) == published
    assert receiver.ids[:3] == [published[0]] * 3
    codes = [one.error_code for one in attempts(sqlite_db)]
    assert codes[2:] == [None, None]
    assert all(codes[:2])


def test_receiver_back_after_recovery_of_the_alert(db: Database, receiver: Receiver) -> None:
    """Catches B21: the receiver is down at the very moment the alert resolves."""
    receiver.statuses(503)
    one = deliverer(db, receiver)
    fire(db, "e1")
    one.run_once()
    resolved = resolve(db, "e1")
    one.run_once()
    receiver.statuses(200)
    before = len(receiver.requests)
    for _ in range(4):
        later(db, minutes=10)
        one.run_once()
    assert receiver.ids[before:] == [resolved]
    assert sorted(states(db)) == ["delivered", "suppressed"]


def test_stops_in_time_and_goes_on(db: Database, receiver: Receiver) -> None:
    """Catches a shutdown that hangs, or that forgets what it had begun."""
    one = deliverer(db, receiver)
    for number in range(30):
        fire(db, f"e{number}", subject=f"s{number}")
    one.start()
    wait_for(lambda: len(receiver.requests) >= 3)
    began = time.monotonic()
    assert one.stop(10)
    assert time.monotonic() - began < 10
    assert not one.is_alive
    assert "sending" not in states(db)
    deliverer(db, receiver).run_once()
    assert set(states(db)) == {"delivered"}
    assert len(receiver.requests) == 30


def test_new_message_wakes_an_idle_lane(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a lane that sleeps through what it is told."""
    one = deliverer(sqlite_db, receiver)
    one.start()
    try:
        assert one.is_alive
        fire(sqlite_db, "e1")
        one.wake()
        wait_for(lambda: set(states(sqlite_db)) == {"delivered"})
    finally:
        assert one.stop(10)


def test_database_that_is_away_is_waited_for(
    sqlite_db: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a lane that dies, silently, when the database is locked once."""
    from quantwatch.errors import StoreError

    one = deliverer(sqlite_db, receiver)
    fire(sqlite_db, "e1")
    real, failed = sqlite_db.reader, threading.Event()

    def broken() -> object:
        if not failed.is_set():
            failed.set()
            raise StoreError("database is locked")
        return real()

    monkeypatch.setattr(sqlite_db, "reader", broken)
    one.start()
    try:
        wait_for(lambda: len(receiver.requests) == 1)
        assert failed.is_set()
        assert one.is_alive
    finally:
        assert one.stop(10)


def test_message_to_an_endpoint_nobody_knows(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a message that waits for ever for an endpoint that left the configuration."""
    tell(sqlite_db, endpoints=("gone",))
    one = deliverer(sqlite_db, receiver)
    one.run_once()
    assert states(sqlite_db) == ["pending"]
    later(sqlite_db, hours=2)
    one.run_once()
    [row] = rows(sqlite_db)
    assert (row.state, row.last_error) == ("dead", "its endpoint is not configured")


def test_a_message_that_cannot_be_rendered(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches one broken message that holds up all others of its endpoint."""
    one = Deliverer(sqlite_db, {"hook": endpoint_to(receiver.port, format="slack")}, client())
    tell(sqlite_db, subject="bad", alerts=["no alert"])
    fire(sqlite_db, "e1", subject="good")
    one.run_once()
    assert states(sqlite_db) == ["retry_wait", "delivered"]
    assert [one.error_code for one in attempts(sqlite_db)] == ["internal", None]


def test_meters(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches retries that nobody can see."""
    receiver.statuses(500, 200)
    one = deliverer(sqlite_db, receiver)
    fire(sqlite_db, "e1")
    for _ in range(2):
        one.run_once()
        to_next(sqlite_db)
    text = generate_latest(meters.REGISTRY).decode()
    for line in (
        'quantwatch_deliveries_total{channel="hook",outcome="delivered"}',
        'quantwatch_deliveries_total{channel="hook",outcome="retry_wait"}',
        'quantwatch_retry_total{operation="delivery"}',
        'quantwatch_retry_latency_seconds_count{operation="delivery"}',
        "quantwatch_delivery_oldest_pending_seconds",
    ):
        assert line in text


def test_failed_operations_are_kept(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a failure that leaves no trace once it is over, or stays open once it is over."""
    receiver.statuses(500, 200)
    one = deliverer(sqlite_db, receiver)
    event_id = fire(sqlite_db, "e1")
    one.run_once()
    [task] = list_failed(sqlite_db)
    assert (task.operation, task.error_code) == ("delivery", "http_500")
    assert task.subject == f"{event_id} to hook"
    to_next(sqlite_db)
    one.run_once()
    assert list_failed(sqlite_db) == []
    assert len(list_failed(sqlite_db, include_resolved=True)) == 1


@pytest.mark.slow
def test_ten_thousand_drain_with_flat_memory(db: Database, receivers: Start) -> None:
    """Catches a queue that is read into memory, and a storm that loses messages."""
    first, second = receivers(), receivers()
    with db.writer() as session:
        for number in range(5000):
            body = {
                "type": "alert.firing",
                "data": {"title": f"number {number}", "fill": "x" * 500},
            }
            event = Event("alert.firing", f"s{number % 500}", body)
            publish(session, event, ["hook", "hook1"])
    one = deliverer(db, first, second, rate_per_minute=20)
    sizes = []
    while any(state != "delivered" for state in states(db)):
        one.run_once()
        later(db, minutes=1)
        sizes.append(psutil.Process().memory_info().rss / 2**20)
        for receiver in (first, second):
            for request in receiver.requests:
                request.headers.clear()
        assert len(sizes) < 30
    print(f"RSS in MB after each minute: {[round(size) for size in sizes]}")
    for receiver in (first, second):
        told = [one for request in receiver.requests for one in _members(request)]
        assert len(told) == len(set(told)) == 5000
    # The receivers keep all bodies in this process: about 7 MB.
    assert sizes[-1] - sizes[0] < 40
    assert health_of(db).num_failures == 0


def _members(request: Request) -> list[str]:
    data = request.document["data"]
    return [one["id"] for one in data.get("messages", [])] or [data["title"]]
