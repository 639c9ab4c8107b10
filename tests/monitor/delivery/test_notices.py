"""What the others are told about an endpoint that fails: those who want it, and its end as well."""

import json

import pytest
from tests.monitor.delivery.loopback import (
    Receiver,
    Reply,
    client,
    endpoint_to,
    events,
    fire,
    know,
    lane_to,
    later,
    states,
)

from quantwatch.delivery import notices
from quantwatch.delivery.lane import Lane
from quantwatch.delivery.loop import Deliverer
from quantwatch.delivery.testing import send_test
from quantwatch.store.applied import apply_endpoints
from quantwatch.store.endpoints import enable_endpoint
from quantwatch.store.session import Database

ABOUT = "endpoint:hook"


def failing(db: Database, receiver: Receiver, status: int = 500) -> Lane:
    """Return a lane whose receiver has failed until the others were told, and now works."""
    lane = lane_to(db, endpoint_to(receiver.port))
    know(db, endpoint_to(1, "other"))
    receiver.statuses(status)
    for number in range(4):
        fire(db, f"e{number}", subject=f"s{number}")
    lane.drain(9)
    receiver.statuses(200)
    return lane


def deliver_to_others(db: Database, receivers: Receiver) -> None:
    lane_to(db, endpoint_to(receivers.port, "other")).drain(9)


def test_recovery_is_told_once(db: Database, receiver: Receiver) -> None:
    """Catches an incident about an endpoint that stays open for ever, or ends again and again."""
    lane = failing(db, receiver)
    deliver_to_others(db, receiver)
    later(db, hours=1)
    lane.drain(9)
    fire(db, "new", subject="new")
    lane.drain(9)
    [event] = events(db, "endpoint.recovered")
    body = json.loads(event.body)
    assert (event.subject, body["data"]["endpoint"]) == (ABOUT, "hook")
    assert body["data"]["title"] == "Endpoint hook takes messages again"
    assert states(db, subject=ABOUT) == ["delivered", "pending"]
    assert states(db, endpoint="hook", subject=ABOUT) == []


def test_recovery_of_trouble_that_nobody_heard_of(db: Database, receiver: Receiver) -> None:
    """Catches the end of a notice that is told to somebody who never got the notice (X17)."""
    lane = failing(db, receiver)
    later(db, hours=1)
    lane.drain(9)
    assert states(db, subject=ABOUT) == ["suppressed", "suppressed"]


def test_recovery_after_it_was_enabled(db: Database, receiver: Receiver) -> None:
    """Catches a disabled endpoint whose incident survives its repair: the streak is forgotten."""
    lane = failing(db, receiver, 410)
    deliver_to_others(db, receiver)
    enable_endpoint(db, "hook", "ann")
    assert events(db, "endpoint.recovered") == []
    send_test(db, lane.endpoint, client())
    assert len(events(db, "endpoint.recovered")) == 1


def test_disabled_endpoint_does_not_recover(db: Database, receiver: Receiver) -> None:
    """Catches a test that works and reads as if the endpoint were enabled."""
    lane = failing(db, receiver, 410)
    send_test(db, lane.endpoint, client())
    assert events(db, "endpoint.recovered") == []


def configured(db: Database, *names: str) -> int:
    """Apply a configuration with these endpoints; return how many notices it ends."""
    with db.writer() as session:
        apply_endpoints(session, {name: endpoint_to(1, name).settings_sha for name in names})
        return notices.end_removed(session, names)


@pytest.mark.parametrize("status", [500, 410], ids=["failing", "disabled"])
def test_what_is_removed_has_no_trouble_any_more(
    db: Database, receiver: Receiver, status: int
) -> None:
    """Catches an incident about an endpoint that no message will ever reach again."""
    failing(db, receiver, status)
    deliver_to_others(db, receiver)
    assert [configured(db, "other") for _ in range(2)] == [1, 0]
    [event] = events(db, "endpoint.recovered")
    data = json.loads(event.body)["data"]
    assert (event.subject, data["endpoint"], data["resolve_reason"]) == (ABOUT, "hook", "removed")
    assert data["title"] == (
        "Endpoint hook is no longer in the configuration: nothing is sent to it any more"
    )
    assert states(db, subject=ABOUT)[-1] == "pending"
    deliver_to_others(db, receiver)
    assert set(states(db, subject=ABOUT)) == {"delivered"}


def test_the_end_of_what_nobody_heard_of(db: Database, receiver: Receiver) -> None:
    """Catches the end of a notice that is told without the notice, or to one that is gone, too."""
    failing(db, receiver)
    assert configured(db, "other") == 1
    assert states(db, subject=ABOUT) == ["suppressed", "suppressed"]
    failing(db, receiver)
    assert configured(db) == 0


def test_a_disabled_endpoint_that_is_configured_stays_somebodys_task(
    db: Database, receiver: Receiver
) -> None:
    """Catches an incident that ends although nobody decided what becomes of the endpoint."""
    failing(db, receiver, 410)
    assert configured(db, "hook", "other") == 0
    assert events(db, "endpoint.recovered") == []


def test_what_comes_back_begins_anew(db: Database, receiver: Receiver) -> None:
    """Catches a second end of what the removal has ended."""
    failing(db, receiver)
    configured(db, "other")
    lane = lane_to(db, endpoint_to(receiver.port))
    fire(db, "new", subject="new")
    lane.drain(9)
    assert len(events(db, "endpoint.recovered")) == 1


def test_no_trouble_no_recovery(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a notice at each message that goes well."""
    lane = lane_to(sqlite_db, endpoint_to(receiver.port))
    know(sqlite_db, endpoint_to(1, "other"))
    receiver.statuses(500, 200)
    for number in range(3):
        fire(sqlite_db, f"e{number}", subject=f"s{number}")
    lane.drain(9)
    assert events(sqlite_db, "endpoint.recovered") == []


@pytest.mark.parametrize(
    ("severities", "is_told"),
    [(("critical",), False), (("warning",), True), (("warning", "critical"), True)],
    ids=["critical", "warning", "both"],
)
def test_only_those_who_take_warnings_are_told(
    sqlite_db: Database, receiver: Receiver, severities: tuple[str, ...], is_told: bool
) -> None:
    """Catches a pager for critical regressions that rings because a chat room is down."""
    receiver.answer = lambda request: Reply(500 if request.path == "/hook" else 200)
    known = {
        "hook": endpoint_to(receiver.port),
        "pager": endpoint_to(receiver.port, "pager", path="/pager", severities=severities),
    }
    one = Deliverer(sqlite_db, known, client())
    one.tidy()
    for number in range(5):
        fire(sqlite_db, f"e{number}", subject=f"s{number}")
    one.run_once()
    assert len(events(sqlite_db, "endpoint.failing")) == 1
    assert (len(states(sqlite_db, endpoint="pager")) == 1) is is_told
    assert notices.deaf(known) == (set() if is_told else {"pager"})
