"""Told again, by a person's wish: a beginning with its end, never what is taken for news."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update
from tests.monitor.delivery.loopback import (
    Receiver,
    endpoint_to,
    fire,
    lane_to,
    resolve,
    rows,
    states,
    tell,
    to_next,
)

from quantwatch.delivery.lane import Lane
from quantwatch.errors import UserError
from quantwatch.store.endpoints import enable_endpoint
from quantwatch.store.replays import OVER, Replayed, replay, replay_dead
from quantwatch.store.session import Database
from quantwatch.store.suppression import Told, told_again
from quantwatch.store.tables import DeliveryRow, EndpointRow

MONTH = timedelta(days=30)


def types(receiver: Receiver, begin: int = 0) -> list[str]:
    return [one.document["type"] for one in receiver.requests[begin:]]


def unheard(db: Database, lane: Lane, *episodes: str) -> str:
    """Let a firing die while the endpoint is disabled; return its id."""
    with db.writer() as session:
        session.execute(update(EndpointRow).values(state="disabled_gone"))
    event_id = fire(db, *episodes)
    lane.drain(9)
    return event_id


def refused(db: Database, lane: Lane, receiver: Receiver, *episodes: str) -> str:
    """Let a firing die because the receiver doesn't want it; return its id."""
    receiver.statuses(400)
    event_id = fire(db, *episodes)
    for _ in range(3):
        lane.drain(9)
        to_next(db)
    receiver.statuses(200)
    return event_id


@pytest.mark.parametrize("what", ["all", "one"])
def test_end_that_was_suppressed(db: Database, receiver: Receiver, what: str) -> None:
    """Catches a firing that is told after a repair, and never its end: it recovered meanwhile."""
    lane = lane_to(db, endpoint_to(receiver.port))
    fired = unheard(db, lane, "e1")
    ended = resolve(db, "e1")
    assert states(db) == ["dead", "suppressed"]
    enable_endpoint(db, "hook", "ann")
    if what == "all":
        assert replay_dead(db, MONTH, "ann") == Replayed(2, over=0)
    else:
        assert replay(db, fired, "ann") == 2
    lane.drain(9)
    assert receiver.ids == [fired, ended]
    assert states(db) == ["delivered", "delivered"]


@pytest.mark.slow
def test_end_that_was_delivered(db: Database, receiver: Receiver) -> None:
    """Catches PagerDuty's incident that a replay opens again after it was resolved."""
    lane = lane_to(db, endpoint_to(receiver.port))
    fired = refused(db, lane, receiver, "e1")
    ended = resolve(db, "e1")
    lane.drain(9)
    assert states(db) == ["dead", "delivered"]
    with pytest.raises(UserError, match=r"is over.*--again"):
        replay(db, fired, "ann")
    assert states(db) == ["dead", "delivered"]
    assert replay_dead(db, MONTH, "ann") == Replayed(0, over=1)
    [row, _] = rows(db)
    assert (row.state, row.last_error) == ("suppressed", OVER)
    before = len(receiver.requests)
    assert lane.drain(9) == 0
    assert replay(db, ended, "ann", again=True) == 1
    lane.drain(9)
    assert receiver.ids[before:] == [ended]


def test_again_tells_the_end_as_well(db: Database, receiver: Receiver) -> None:
    """Catches a beginning that is told again by a person's wish and stays open."""
    lane = lane_to(db, endpoint_to(receiver.port))
    fired = fire(db, "e1")
    lane.drain(9)
    ended = resolve(db, "e1")
    lane.drain(9)
    assert replay(db, fired, "ann", again=True) == 2
    lane.drain(9)
    assert receiver.ids == [fired, ended, fired, ended]


def test_something_new_fires_meanwhile(db: Database, receiver: Receiver) -> None:
    """Catches an old end, told again, that closes the incident of what fires now."""
    lane = lane_to(db, endpoint_to(receiver.port))
    old = unheard(db, lane, "e1")
    resolve(db, "e1")
    enable_endpoint(db, "hook", "ann")
    fire(db, "e2")
    lane.drain(9)
    assert types(receiver) == ["alert.firing"]
    with pytest.raises(UserError, match="is over"):
        replay(db, old, "ann", again=True)
    assert replay_dead(db, MONTH, "ann") == Replayed(0, over=1)
    assert lane.drain(9) == 0


def test_end_of_what_was_never_told(db: Database, receiver: Receiver) -> None:
    """Catches an end that is replayed although its beginning is dead and was never heard."""
    lane = lane_to(db, endpoint_to(receiver.port))
    fired = unheard(db, lane, "e1")
    ended = tell(db, "alert.resolved", alerts=[{"episode": "e1"}, {"episode": "e2"}], reason="x")
    lane.drain(9)
    with db.writer() as session:
        dead = update(DeliveryRow).where(DeliveryRow.event_id == ended)
        session.execute(dead.values(state="dead"))
    enable_endpoint(db, "hook", "ann")
    with pytest.raises(UserError, match="not told again"):
        replay(db, ended, "ann")
    assert replay(db, fired, "ann") == 2


FIRE, END, SOME = "alert.firing", "alert.resolved", "alert.updated"


def row(number: int, state: str, kind: str, episodes: str) -> Told:
    return Told(
        number,
        state,
        left_machine=state == "delivered",
        type=kind,
        episodes=frozenset(episodes),
        complete=True,
        ends_all=kind == END,
    )


CASES: dict[str, tuple[list[tuple[str, str, str]], set[int], set[int]]] = {
    "still true": ([("dead", FIRE, "a")], {0}, {0}),
    "both dead": ([("dead", FIRE, "a"), ("dead", END, "a")], {0, 1}, {0, 1}),
    "the end waits": ([("dead", FIRE, "a"), ("pending", END, "a")], {0}, {0, 1}),
    "the end is on its way": ([("dead", FIRE, "a"), ("sending", END, "a")], {0}, set()),
    "some of it has ended": (
        [("dead", FIRE, "ab"), ("suppressed", SOME, "a"), ("suppressed", END, "b")],
        {0},
        {0, 2},
    ),
    "ended by an update that has its own end": (
        [("dead", FIRE, "a"), ("suppressed", SOME, "a"), ("suppressed", END, "b")],
        {0},
        {0, 1, 2},
    ),
    "an update after the end": ([("dead", SOME, "a"), ("delivered", END, "b")], {0}, set()),
    "others go on": ([("dead", FIRE, "a"), ("delivered", FIRE, "b")], {0}, {0}),
    "the end of something that was heard": (
        [("delivered", FIRE, "a"), ("dead", END, "a")],
        {1},
        {1},
    ),
}


@pytest.mark.parametrize(("told", "chosen", "expected"), CASES.values(), ids=CASES)
def test_told_again(told: list[tuple[str, str, str]], chosen: set[int], expected: set[int]) -> None:
    """Catches a replay after which the receiver believes what is not so."""
    rows_ = [row(number, *one) for number, one in enumerate(told)]
    assert told_again(rows_, chosen, again=False) == expected


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["pending", "delivered", "dead", "suppressed"]),
            st.sampled_from([FIRE, SOME, END]),
            st.sampled_from(["a", "b", "ab"]),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_replay_law(drawn: list[tuple[str, str, str]], again: bool) -> None:
    """Law: no beginning is told again without its end, no end after what began since."""
    told = [row(number, *one) for number, one in enumerate(drawn)]
    chosen = {one.id for one in told if one.state == "dead"}
    found = told_again(told, chosen, again=again)
    for one in told:
        later = told[one.id + 1 :]
        if one.id in found and one.type != END and any(x.type == END for x in later):
            assert any(x.id in found for x in later if x.resolves)
        if one.id in found and one.type == END:
            assert not any(x.state == "delivered" for x in later if x.type == FIRE)
