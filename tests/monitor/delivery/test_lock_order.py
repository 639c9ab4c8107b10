"""Who changes deliveries takes the locks in one order: nobody waits in a ring (PostgreSQL 40P01)."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import select, update
from tests.monitor.delivery.loopback import (
    attempts,
    endpoint_to,
    events,
    fire,
    health_of,
    know,
    later,
    resolve,
    rows,
    states,
    tell,
    until_waiting,
)

from quantwatch.config.endpoints import Endpoint
from quantwatch.config.service import RetentionConfig
from quantwatch.delivery import notices
from quantwatch.delivery.claiming import claim
from quantwatch.delivery.client import Answer
from quantwatch.delivery.loop import Deliverer
from quantwatch.delivery.settling import settle
from quantwatch.errors import ConflictError, StoreError, UserError
from quantwatch.store import clock, retention
from quantwatch.store.deliveries import finish
from quantwatch.store.digests import end_members
from quantwatch.store.endpoints import lock_endpoint, save_endpoint
from quantwatch.store.lock_order import MOST_TRIES, again
from quantwatch.store.outbox import Event, publish, suppress_untold
from quantwatch.store.replays import replay_dead
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import DeliveryRow, EndpointRow

SOON_S = 30.0
SETTLING = "quantwatch.delivery.settling"
HOOK = endpoint_to(1)
OK = Answer(200, left_machine=True)
DOWN = Answer(500, left_machine=True)
REFUSED = Answer(error_code="connect", text="refused", left_machine=False)


class Beside:
    """Does something in a thread, over a connection of its own, and keeps what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test asks for it
            self.error = error

    def end(self) -> None:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


# SQLite has one writer at a time.
on_postgres = pytest.mark.parametrize(
    "database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)


@on_postgres
def test_an_end_is_published_while_an_attempt_ends(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the ring of 2026-11: settle held the first and wanted the second, publish reversed."""
    know(db, HOOK)
    fire(db, "a", "b")
    message = claim(db, HOOK)
    assert message is not None
    alerts = [{"episode": "a"}]
    tell(db, "alert.updated", alerts=alerts, reason="resolved_some")
    real, others = suppress_untold, []

    def meanwhile(*args: object) -> int:
        others.append(Beside(lambda: resolve(db, "a", "b")))
        until_waiting(db)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(f"{SETTLING}.suppress_untold", meanwhile)
    assert settle(db, message, HOOK, DOWN, 0.5) is not None
    others[0].end()
    assert states(db) == ["suppressed", "pending", "pending"], "as one after the other"


@on_postgres
def test_two_endpoints_recover_at_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two deliverers that each hold a notice and want the one that the other holds."""
    one, two = HOOK, endpoint_to(2, "two")
    know(db, one, two)
    for failed, other in ((one, two), (two, one)):
        tell(db, "endpoint.failing", f"endpoint:{failed.name}", (other.name,))
    first, second = claim(db, one), claim(db, two)
    assert first is not None
    assert second is not None
    real, others = notices.tell, []

    def meanwhile(*args: object) -> None:
        monkeypatch.setattr(notices, "tell", real)
        others.append(Beside(lambda: settle(db, second, two, OK, 0.5)))
        until_waiting(db)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(notices, "tell", meanwhile)
    assert settle(db, first, one, OK, 0.5) is not None
    others[0].end()
    told = [row.state for row in rows(db, state="delivered")]
    assert len(told) == 2
    assert len(events(db, "endpoint.recovered")) == 2


@on_postgres
def test_a_run_tells_two_ends_while_a_digest_ends(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches members that are ended in another order than a run's messages are written in."""
    few = endpoint_to(1, rate_per_minute=1)
    know(db, few)
    for name in "ab":
        fire(db, name, subject=name)
    message = claim(db, few)
    assert message is not None
    assert states(db, subject="a") == ["grouped"]

    def two_ends() -> None:
        with db.writer() as session:
            for name in "ba":
                body = {"type": "alert.resolved", "data": {"reason": "resolved_all"}}
                publish(session, Event("alert.resolved", name, body), ["hook"])

    real, others = end_members, []

    def meanwhile(*args: object) -> int:
        others.append(Beside(two_ends))
        until_waiting(db)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("quantwatch.store.deliveries.end_members", meanwhile)
    assert settle(db, message, few, OK, 0.5) is not None
    others[0].end()
    for name in "ab":
        assert states(db, subject=name) == ["delivered", "pending"]


@on_postgres
@pytest.mark.slow
def test_everybody_writes_at_once(database_url: str, db: Database) -> None:
    """Catches any two of all writers that wait for each other: none is ended, nothing is stuck."""
    names = ["hook", "two", "three"]
    known = {name: endpoint_to(1, name, rate_per_minute=600) for name in names}
    know(db, *known.values())
    ends = time.monotonic() + 5
    writers: list[Callable[[Database, random.Random], None]] = [
        *(partial(_publish_some, names, seed) for seed in range(2)),
        *(partial(_send_some, known[name]) for name in names),
        partial(_look_after, known),
        _replay_some,
    ]

    def forever(work: Callable[[Database, random.Random], None], seed: int) -> None:
        mine, chance = open_database(database_url, wait_s=20), random.Random(seed)
        while time.monotonic() < ends:
            work(mine, chance)
        mine.close()

    beside = [Beside(partial(forever, work, seed)) for seed, work in enumerate(writers)]
    for one in beside:
        one.end()
    later(db, minutes=5)
    Deliverer(db, known).tidy()
    assert "sending" not in states(db)
    with db.reader() as session:
        every = session.scalars(select(DeliveryRow)).all()
        ended = {(row.event_id, row.endpoint) for row in every if row.ended_at is not None}
        carried = {(row.digest_id, row.endpoint) for row in every if row.state == "grouped"}
    assert not carried & ended, "a digest has ended and what it carried waits for ever"
    assert len(every) > 50


def _publish_some(names: list[str], seed: int, db: Database, chance: random.Random) -> None:
    """Write like the end of a run: several subjects, several endpoints, in any order."""
    with db.writer() as session:
        for subject in chance.sample("abcdef", 3):
            kind = chance.choice(["alert.firing", "alert.updated", "alert.resolved"])
            data = {"alerts": [{"episode": chance.choice("xyz")}], "title": f"{seed}"}
            publish(session, Event(kind, subject, {"type": kind, "data": data}), names)


def _send_some(endpoint: Endpoint, db: Database, chance: random.Random) -> None:
    message = claim(db, endpoint)
    if message is not None:
        settle(db, message, endpoint, chance.choice([OK, DOWN, REFUSED]), 0.5)
    with db.writer() as session:
        # Nothing waits for its next attempt here, and every other message is a digest.
        state, now = lock_endpoint(session, endpoint.name), clock.now(session)
        its = update(DeliveryRow).where(DeliveryRow.endpoint == endpoint.name)
        session.execute(its.values(next_at=now))
        tokens = float(chance.choice([1, 5]))
        save_endpoint(session, replace(state, state="enabled", tokens=tokens, tokens_at=now))


def _look_after(known: dict[str, Endpoint], db: Database, chance: random.Random) -> None:
    Deliverer(db, known).tidy()
    limits = RetentionConfig(logs="1s") if chance.random() < 0.5 else RetentionConfig()
    retention.step(db, limits, budget_s=0.2)


def _replay_some(db: Database, chance: random.Random) -> None:
    with contextlib.suppress(UserError):
        replay_dead(db, timedelta(seconds=chance.choice([1, 10])), "ann")
    threading.Event().wait(0.05)


# what may still be ended for another transaction


@on_postgres
def test_a_transaction_that_was_ended_for_another_is_repeated(db: Database) -> None:
    """Catches results of hours of measuring that are thrown away for one deadlock."""
    know(db, HOOK, endpoint_to(2, "two"))
    together, tries = threading.Barrier(2), []

    def take(names: str) -> None:
        tries.append(names)
        with db.writer() as session:
            for name in names.split():
                change = update(EndpointRow).where(EndpointRow.name == name)
                session.execute(change.values(num_failures=EndpointRow.num_failures + 1))
                if len(tries) <= 2 and name == names.split(maxsplit=1)[0]:
                    together.wait(SOON_S)

    both = [Beside(partial(again, partial(take, order))) for order in ("hook two", "two hook")]
    for one in both:
        one.end()
    assert len(tries) > 2  # whoever is ended may meet the other again
    assert [health_of(db, name).num_failures for name in ("hook", "two")] == [2, 2]


@pytest.mark.parametrize(
    ("error", "num"),
    [
        pytest.param(ConflictError("deadlock"), MOST_TRIES, id="deadlock"),
        pytest.param(StoreError("disk full"), 1, id="other"),
    ],
)
def test_repeated_not_for_ever(error: Exception, num: int) -> None:
    """Catches a loop without an end, and one around what no repetition mends."""
    tries = []

    def fail() -> None:
        tries.append(1)
        raise error

    with pytest.raises(type(error), match=str(error)):
        again(fail)
    assert len(tries) == num


def test_settling_is_repeated(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a message that is sent again because its end was not written down."""
    know(db, HOOK)
    fire(db, "a")
    message = claim(db, HOOK)
    assert message is not None
    real, left = finish, [ConflictError("deadlock")]

    def once(*args: object) -> bool:
        if left:
            raise left.pop()
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(f"{SETTLING}.finish", once)
    assert settle(db, message, HOOK, OK, 0.5) is not None
    assert states(db) == ["delivered"]
    assert len(attempts(db)) == 1
