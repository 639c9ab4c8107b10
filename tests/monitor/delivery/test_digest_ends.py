"""What a digest carries: ends as the digest ends, whatever that is, and takes nothing from others."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import delete, update
from tests.monitor.delivery.loopback import (
    Receiver,
    endpoint_to,
    fire,
    know,
    lane_to,
    later,
    resolve,
    rows,
    states,
    tell,
    to_next,
    until_waiting,
)

from quantwatch.delivery import claiming
from quantwatch.delivery.claiming import claim
from quantwatch.delivery.client import Answer, Client
from quantwatch.delivery.formats import digest
from quantwatch.delivery.lane import Lane
from quantwatch.delivery.loop import Deliverer
from quantwatch.store import clock, deliveries, digests
from quantwatch.store.endpoints import enable_endpoint
from quantwatch.store.outbox import suppress_untold
from quantwatch.store.replays import Replayed, replay_dead
from quantwatch.store.session import Database
from quantwatch.store.tables import DeliveryRow, EndpointRow, EventRow

HOOK = endpoint_to(1, rate_per_minute=1)


class Answers(Client):
    """Gives the same answer until it is told another one."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer, self.num_posts = answer, 0

    def post(self, *_message: object) -> Answer:
        self.num_posts += 1
        return self.answer


def two(db: Database, answer: Answer) -> Lane:
    """Return a lane whose digest of two firings got that answer once."""
    know(db, HOOK)
    for name in "ab":
        fire(db, name, subject=name)
    lane = Lane(db, HOOK, Answers(answer), lambda: 0.5)
    assert lane.drain(1) == 1
    assert states(db) == ["grouped", "grouped", "retry_wait"]
    return lane


def until_dead(db: Database, lane: Lane) -> None:
    for _ in range(10):
        if states(db, subject="digest:hook") == ["dead"]:
            break
        to_next(db)
        later(db, minutes=1)
        lane.drain(1)
    assert states(db, subject="digest:hook") == ["dead"]


def members(db: Database) -> list[DeliveryRow]:
    return [row for row in rows(db) if row.subject in "ab"]


TIMEOUT = Answer(error_code="timeout", text="slow", left_machine=True)
REFUSED = Answer(error_code="connect", text="refused", left_machine=False)


def disable(db: Database) -> None:
    with db.writer() as session:
        session.execute(update(EndpointRow).values(state="disabled_auto", reason="5 days"))


@pytest.mark.parametrize("how", ["disabled", "not configured"])
def test_members_of_a_buried_digest(db: Database, how: str) -> None:
    """Catches members that stay grouped for ever, can't be replayed and block their subjects."""
    lane = two(db, Answer(500, left_machine=True))
    if how == "disabled":
        disable(db)
        assert claim(db, HOOK) is None
    else:
        later(db, hours=2)
        Deliverer(db, {}, Answers(TIMEOUT)).run_once()
    assert states(db) == ["dead"] * 3
    assert [row.left_machine for row in members(db)] == [True, True]
    assert all(row.ended_at for row in members(db))
    enable_endpoint(db, "hook", "ann")
    assert replay_dead(db, timedelta(days=1), "ann") == Replayed(2, over=0)
    lane.client = Answers(Answer(200, left_machine=True))
    fire(db, "later", subject="a")
    for _ in range(4):
        later(db, minutes=2)
        lane.drain(10)
    assert states(db, subject="a") == ["delivered", "delivered"]


@pytest.mark.parametrize("carrier", ["dead", "gone"])
def test_members_that_were_left_behind_already(db: Database, carrier: str) -> None:
    """Catches databases in which the digest ended, or was pruned, and its members did not."""
    two(db, Answer(500, left_machine=True))
    with db.writer() as session:
        moment = clock.now(session)
        ended = update(DeliveryRow).where(DeliveryRow.subject == "digest:hook")
        session.execute(ended.values(state="dead", ended_at=moment, last_error="buried"))
        if carrier == "gone":
            mine = DeliveryRow.subject == "digest:hook"
            session.execute(delete(DeliveryRow).where(mine))
            session.execute(delete(EventRow).where(EventRow.subject == "digest:hook"))
    Deliverer(db, {"hook": HOOK}, Answers(TIMEOUT)).tidy()
    assert [(row.state, row.left_machine) for row in members(db)] == [("dead", True)] * 2


def test_digest_that_was_perhaps_heard(db: Database) -> None:
    """Catches X17: attempts 1 to 7 time out, the 8th is refused, and the end is not told."""
    lane = two(db, TIMEOUT)
    for _ in range(6):
        to_next(db)
        later(db, minutes=1)
        lane.drain(1)
    lane.client = Answers(REFUSED)
    until_dead(db, lane)
    assert [row.left_machine for row in members(db)] == [True, True]
    resolve(db, "a", subject="a")
    assert states(db, subject="a") == ["dead", "pending"]


def test_lost_digest_was_perhaps_heard(db: Database) -> None:
    """Catches a digest whose sender was killed, counted as never heard by what it carried."""
    know(db, HOOK)
    for name in "ab":
        fire(db, name, subject=name)
    assert claim(db, HOOK) is not None
    later(db, minutes=3)
    with db.writer() as session:
        assert deliveries.take_back(session) == 1
    until_dead(db, Lane(db, HOOK, Answers(REFUSED), lambda: 0.5))
    assert [row.left_machine for row in members(db)] == [True, True]


def test_digest_that_nobody_heard(db: Database) -> None:
    """Catches an end that is told of a beginning that died, unheard, inside a digest."""
    lane = two(db, REFUSED)
    resolve(db, "a", subject="a")
    assert states(db, subject="a") == ["grouped", "pending"]
    until_dead(db, lane)
    assert states(db, subject="a") == ["dead", "suppressed"]
    assert states(db, subject="b") == ["dead"]


def test_buried_beginning_takes_its_end_along(db: Database) -> None:
    """Catches an end that is told after its beginning was buried unheard."""
    know(db, endpoint_to(1, "new"))
    fire(db, "a", "b", subject="a", endpoints=("new",))
    later(db, minutes=50)
    tell(db, "alert.updated", "a", ("new",), alerts=[{"episode": "a"}], reason="resolved_some")
    assert states(db) == ["pending", "pending"]
    later(db, minutes=20)
    Deliverer(db, {}, Answers(TIMEOUT)).tidy()
    assert states(db) == ["dead", "suppressed"]


def test_message_that_is_resolved_meanwhile(
    db: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the race of 2026-11: a digest that takes what a publish has just suppressed."""
    lane = lane_to(db, endpoint_to(receiver.port, rate_per_minute=1))
    for name in "abc":
        fire(db, name, subject=name)
    real, others = digest.members_of, []

    def meanwhile(*args: object) -> object:
        others.append(threading.Thread(target=lambda: resolve(db, "a", subject="a")))
        others[0].start()
        if db.engine.dialect.name == "postgresql":
            until_waiting(db)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(claiming, "members_of", meanwhile)
    assert claim(db, lane.endpoint) is not None
    others[0].join()
    assert states(db, subject="a") == ["grouped", "pending"]
    assert states(db, subject="b") == ["grouped"]


def test_suppressed_is_not_grouped(db: Database) -> None:
    """Catches a digest that brings back what need not be told."""
    for name in "ab":
        fire(db, name, subject=name)
    first, second = rows(db)
    with db.writer() as session:
        mine = DeliveryRow.subject == "a"
        session.execute(update(DeliveryRow).where(mine).values(state="suppressed"))
        digests.group(session, [first.id, second.id], "digest")
        assert suppress_untold(session, "hook", "a") == 0
    assert states(db) == ["suppressed", "grouped"]
