"""The audit log as it is read: who changed what, the newest first."""

from datetime import timedelta

import pytest

from quantwatch.errors import UserError
from quantwatch.store import audit, clock, silences
from quantwatch.store.replays import waits
from quantwatch.store.session import Database
from quantwatch.store.tables import DeliveryRow, EventRow


def test_entries_are_newest_first_and_of_one_subject(db: Database) -> None:
    """Catches a log that shows the oldest changes, or those of another check."""
    with db.writer() as session:
        audit.note(session, "ann", "paused", "check a", after={"reason": "move"})
        audit.note(session, "bob", "paused", "check ab")
        audit.note(session, "ann", "resumed", "check a", before={"by": "ann"})

    assert [(one.actor, one.action) for one in audit.list_entries(db)] == [
        ("ann", "resumed"),
        ("bob", "paused"),
        ("ann", "paused"),
    ]
    newest, oldest = audit.list_entries(db, subject="check a")
    assert (newest.before, newest.after) == ({"by": "ann"}, None)
    assert (oldest.before, oldest.after) == (None, {"reason": "move"})
    assert newest.at >= oldest.at
    assert newest.at.tzinfo is not None
    assert [one.action for one in audit.list_entries(db, limit=1)] == ["resumed"]
    assert audit.list_entries(db, subject="check %") == []


def test_a_silence_that_has_ended(db: Database) -> None:
    """Catches one that is taken for unknown once it is over, or for over while it holds."""
    with db.writer() as session:
        made = silences.add_silence(session, {"check": "a"}, timedelta(hours=1), "ann", "move")
        assert not silences.has_ended(session, made.id)
        assert not silences.has_ended(session, made.id + 1)
        silences.lift_silence(session, made.id, "ann")
    with db.reader() as session:
        assert silences.has_ended(session, made.id)
    with db.writer() as session, pytest.raises(UserError):
        silences.lift_silence(session, made.id, "ann")


@pytest.mark.parametrize(
    ("states", "again", "on_its_way"),
    [
        (("pending",), False, True),
        (("sending", "delivered"), False, True),
        (("retry_wait",), True, True),
        (("grouped",), True, True),
        (("pending", "dead"), False, False),
        (("pending", "delivered"), True, False),
        (("delivered",), False, False),
        ((), False, False),
    ],
    ids=str,
)
def test_an_event_that_waits_already(
    db: Database, states: tuple[str, ...], again: bool, on_its_way: bool
) -> None:
    """Catches a second press on Replay that is an error, or one that does nothing for a dead letter."""
    with db.writer() as session:
        now = clock.now(session)
        session.add(EventRow(id="e", type="test", occurred_at=now, subject="s", seq=1, body=b"{}"))
        session.flush()
        for number, state in enumerate(states):
            session.add(
                DeliveryRow(
                    event_id="e",
                    endpoint=f"ops{number}",
                    subject="s",
                    seq=1,
                    state=state,
                    attempt=0,
                    created_at=now,
                    next_at=now,
                    left_machine=False,
                )
            )
        session.flush()

    assert waits(db, "e", again=again) is on_its_way
