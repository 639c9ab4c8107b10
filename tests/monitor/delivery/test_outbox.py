"""The outbox: written with what happened, in order, as bytes that never change."""

import threading
from datetime import timedelta

import pytest
from tests.monitor.delivery.loopback import (
    Receiver,
    endpoint_to,
    events,
    fire,
    lane_to,
    later,
    resolve,
    rows,
    states,
    tell,
    to_next,
)

from quantwatch.errors import UserError
from quantwatch.store.dead_letters import list_deliveries
from quantwatch.store.outbox import Event, canonical, publish
from quantwatch.store.replays import Replayed, replay, replay_dead
from quantwatch.store.session import Database


def test_all_or_nothing(db: Database) -> None:
    """Catches B21: a message on something that was rolled back, or the other way round."""

    def fail() -> None:
        with db.writer() as session:
            publish(session, Event("alert.firing", "s", {"type": "alert.firing"}), ["a", "b"])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert rows(db) == []
    assert events(db, "alert.firing") == []


def test_one_delivery_per_endpoint(db: Database) -> None:
    """Catches an endpoint that is named twice and told twice."""
    tell(db, endpoints=("a", "b", "a"))
    tell(db, endpoints=())
    assert [row.endpoint for row in rows(db)] == ["a", "b"]
    assert [event.seq for event in events(db, "alert.firing")] == [0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_what_json_cannot_hold(sqlite_db: Database, value: object) -> None:
    """Catches B14: NaN in a message, which strict receivers refuse for ever."""
    with pytest.raises((ValueError, TypeError)):
        tell(sqlite_db, value=value)
    assert rows(sqlite_db) == []


def test_canonical_bytes() -> None:
    """Catches B26: bytes that depend on the order of keys; half a surrogate pair stays JSON."""
    assert canonical({"b": "数", "a": "\ud83d"}) == '{"a":"\\ud83d","b":"数"}'.encode()


def test_order_of_concurrent_writers(db: Database) -> None:
    """Catches two writers that give out the same number in a subject."""
    barrier = threading.Barrier(4)

    def write() -> None:
        barrier.wait()
        for _ in range(5):
            tell(db, subject="shared")

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event.seq for event in events(db, "alert.firing")) == list(range(20))


def test_suppression_is_per_endpoint(db: Database, receiver: Receiver) -> None:
    """Catches X17: one channel that was told and one that was not are treated alike."""
    fire(db, "e1", endpoints=("hook", "other"))
    lane_to(db, endpoint_to(receiver.port)).drain(5)
    resolve(db, "e1", endpoints=("hook", "other"))
    assert states(db, endpoint="hook") == ["delivered", "pending"]
    assert states(db, endpoint="other") == ["suppressed", "suppressed"]


def test_replay_keeps_id_and_body(db: Database, receiver: Receiver) -> None:
    """Catches a replay under a new id (huggingface/hub-docs#2749), or with the old signature."""
    receiver.statuses(400, 400, 400, 200)
    event_id = tell(db)
    lane = lane_to(db, endpoint_to(receiver.port))
    for _ in range(3):
        lane.drain(5)
        to_next(db)
    assert states(db) == ["dead"]
    assert replay(db, event_id, "ann") == 1
    later(db, seconds=30)
    lane.drain(5)
    assert states(db) == ["delivered"]
    assert set(receiver.ids) == {event_id}
    assert len({request.body for request in receiver.requests}) == 1
    stamps = [request.headers["webhook-timestamp"] for request in receiver.requests]
    assert stamps[3] != stamps[2]
    [line] = list_deliveries(db)
    assert (line.state, line.attempt, line.last_status) == ("delivered", 1, 200)


def test_replay_of_delivered_needs_a_word(db: Database, receiver: Receiver) -> None:
    """Catches a slip that tells everybody everything again."""
    event_id = tell(db)
    lane = lane_to(db, endpoint_to(receiver.port))
    lane.drain(5)
    with pytest.raises(UserError, match="hook delivered"):
        replay(db, event_id, "ann")
    assert replay(db, event_id, "ann", again=True) == 1
    lane.drain(5)
    assert receiver.ids == [event_id, event_id]


def test_replay_of_what_is_not_there(sqlite_db: Database) -> None:
    """Catches a typing error that looks like success."""
    with pytest.raises(UserError, match="no event"):
        replay(sqlite_db, "01ABC", "ann")


def test_replay_all_since(db: Database, receiver: Receiver) -> None:
    """Catches a replay that takes what died long ago, or a digest beside what it carried."""
    receiver.statuses(422)
    old = fire(db, "old", subject="old")
    lane = lane_to(db, endpoint_to(receiver.port, rate_per_minute=4))
    for _ in range(3):
        lane.drain(5)
        to_next(db)
    later(db, days=3)
    new = [fire(db, f"e{i}", subject=f"s{i}") for i in range(6)]
    for _ in range(6):
        lane.drain(5)
        to_next(db)
        later(db, minutes=2)
    assert set(states(db)) == {"dead"}
    assert replay_dead(db, timedelta(days=2), "ann") == Replayed(6, over=0)
    waiting = {row.event_id for row in rows(db, state="pending")}
    assert waiting == set(new)
    assert old not in waiting


def test_replay_to_a_disabled_endpoint(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a replay that dies again unseen."""
    receiver.statuses(410)
    event_id = tell(sqlite_db)
    lane_to(sqlite_db, endpoint_to(receiver.port)).drain(5)
    with pytest.raises(UserError, match="endpoints enable hook"):
        replay(sqlite_db, event_id, "ann")


def test_list_refuses_unknown_states(sqlite_db: Database) -> None:
    """Catches an empty list that looks like good news."""
    with pytest.raises(UserError, match=r"'ded'.*dead"):
        list_deliveries(sqlite_db, state="ded")
