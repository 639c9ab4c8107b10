"""What was told and what endpoints lack, however much of it there is, on both databases."""

import json
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.orm import Session

from quantwatch.store import backlog, episodes, lookups, silences, told
from quantwatch.store.session import Database
from quantwatch.store.tables import AlertRow, DeliveryRow, EventRow

START = datetime(2026, 11, 1, tzinfo=UTC)
SUBJECT = "nightly/int8"


def tell(
    session: Session, number: int, episodes_named: Collection[str] = ("E",), more: int = 0
) -> None:
    """Write a message, one each minute."""
    data = {"alerts": [{"episode": each} for each in episodes_named], "more_alerts": more}
    session.add(
        EventRow(id=f"e{number:05}", type="alert.firing", subject=SUBJECT, seq=number,
                 occurred_at=START + timedelta(minutes=number), body=json.dumps({"data": data}).encode())
    )  # fmt: skip


def deliver(
    session: Session, number: int, endpoint: str, state: str, ended_min: int | None, error: str = ""
) -> None:
    """Write a delivery of a message of its own."""
    tell(session, number)
    session.flush()
    at = START + timedelta(minutes=number)
    session.add(
        DeliveryRow(event_id=f"e{number:05}", endpoint=endpoint, subject=SUBJECT, seq=number,
                    state=state, attempt=1, created_at=at, next_at=at, left_machine=False,
                    last_error=error or None,
                    ended_at=None if ended_min is None else START + timedelta(minutes=ended_min))
    )  # fmt: skip


@pytest.mark.parametrize(
    ("total", "shown", "left_out", "at"),
    [
        pytest.param(0, 0, 0, None, id="none"),
        pytest.param(200, 200, 0, None, id="as many as the last"),
        pytest.param(300, 300, 0, None, id="as many as both ends"),
        pytest.param(1_000, 300, 700, 99, id="many"),
    ],
)
def test_the_beginning_of_a_long_episode_is_there(
    db: Database, total: int, shown: int, left_out: int, at: int | None
) -> None:
    """Catches a story without the message that it began with, and a gap that nobody is told of."""
    with db.writer() as session:
        for number in range(total):
            tell(session, number)
    with db.reader() as session:
        found = told.messages_on(session, SUBJECT, "E", START)

    assert len(found.sent) == shown
    assert found.num_left_out == left_out
    assert found.left_out_at == (None if at is None else START + timedelta(minutes=at))
    numbers = [int(one.event_id[1:]) for one in found.sent]
    assert numbers == sorted(numbers)
    if total:
        assert (numbers[0], numbers[-1]) == (0, total - 1)


def test_messages_on_other_episodes_are_left_out(db: Database) -> None:
    """Catches another episode's messages, and one that counts more than it names."""
    with db.writer() as session:
        tell(session, 1, ["E", "F"])
        tell(session, 2, ["F"])
        tell(session, 3, ["F"], more=2)
        tell(session, 4_000, ["E"])
    with db.reader() as session:
        found = told.messages_on(session, SUBJECT, "E", START, START + timedelta(hours=1))

    assert [(one.event_id, one.is_certain) for one in found.sent] == [
        ("e00001", True),
        ("e00003", False),
    ]


def test_the_last_error_is_of_the_last_to_die(db: Database) -> None:
    """Catches the error of the youngest delivery, which may have died first."""
    with db.writer() as session:
        deliver(session, 1, "ops", "dead", 90, "410 Gone")
        deliver(session, 2, "ops", "dead", 30, "timeout")
        deliver(session, 3, "ops", "delivered", 95)
        deliver(session, 4, "pager", "dead", 91, "refused")
        deliver(session, 5, "pager", "retry_wait", None, "refused again")
    with db.reader() as session:
        found = backlog.loads(session)

    assert found["ops"].last_error == "410 Gone"
    assert found["ops"].died_at == START + timedelta(minutes=90)
    assert (found["ops"].num_dead, found["ops"].num_waiting) == (2, 0)
    assert (found["pager"].last_error, found["pager"].num_waiting) == ("refused", 1)


def test_deliveries_are_counted_by_state(db: Database) -> None:
    """Catches a state that is counted twice, or by neither of the two counts."""
    states = ("pending", "retry_wait", "sending", "grouped", "dead", "dead", "delivered", "suppressed",
              "cancelled")  # fmt: skip
    with db.writer() as session:
        for number, state in enumerate(states):
            is_open = state in ("pending", "retry_wait", "sending", "grouped")
            deliver(session, number, "ops", state, None if is_open else number)
    with db.reader() as session:
        lacking, ended = backlog.lacking_by_state(session), backlog.ended_by_state(session)

    assert lacking == {"pending": 1, "retry_wait": 1, "sending": 1, "grouped": 1, "dead": 2}
    assert ended == {"delivered": 1, "suppressed": 1, "cancelled": 1}


def test_labels_of_what_fires(db: Database) -> None:
    """Catches an alert that only waits, and evidence that is read to match four words."""
    with db.writer() as session:
        check_id = lookups.check_id(session, "nightly")
        for rule, state in (
            ("kl", "firing"),
            ("top", "recovering"),
            ("new", "pending"),
            ("old", "inactive"),
        ):
            session.add(AlertRow(check_id=check_id, candidate="int8", rule=rule, state=state, severity="warning"))  # fmt: skip
    with db.reader() as session:
        found = silences.firing_labels(session)
        whole = [
            one.labels
            for one in episodes.open_alerts(session)
            if one.state in ("firing", "recovering")
        ]

    assert sorted(found, key=str) == sorted(whole, key=str)
    assert {labels["rule"] for labels in found} == {"kl", "top"}
