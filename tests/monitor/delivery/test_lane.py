"""One endpoint: what each answer leads to, in which order, and what others are told."""

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from standardwebhooks import Webhook
from tests.monitor.delivery.loopback import (
    SECRET,
    Receiver,
    Reply,
    Request,
    attempts,
    endpoint_to,
    events,
    fire,
    health_of,
    know,
    lane_to,
    later,
    resolve,
    rows,
    states,
    tell,
    to_next,
)

from quantwatch.delivery.claiming import claim
from quantwatch.delivery.lane import Lane
from quantwatch.store.deliveries import take_back
from quantwatch.store.endpoints import enable_endpoint, sync_endpoints
from quantwatch.store.session import Database

Start = Callable[[], Receiver]


def drain(lane: Lane) -> int:
    return lane.drain(1000)


def test_delivered_once_and_signed(db: Database, receiver: Receiver) -> None:
    """Catches B26: other bytes sent than signed; and a message that is sent again."""
    event_id = tell(db, title="KL über 0.15 数学")
    lane = lane_to(db, endpoint_to(receiver.port))
    assert drain(lane) == 1
    assert drain(lane) == 0
    [request] = receiver.requests
    assert request.id == event_id
    verified = Webhook(SECRET).verify(request.body, request.headers)
    assert verified["data"]["title"] == "KL über 0.15 数学"
    [row] = rows(db)
    assert (row.state, row.attempt, row.left_machine, row.last_status) == (
        "delivered",
        1,
        True,
        200,
    )
    [attempt] = attempts(db)
    assert (attempt.number, attempt.status, attempt.error_code) == (1, 200, None)


def test_retries_keep_id_and_body(db: Database, receiver: Receiver) -> None:
    """Catches B25: a receiver that can't tell a retry from another message."""
    tell(db)
    receiver.statuses(500, 503, 200)
    lane = lane_to(db, endpoint_to(receiver.port))
    drain(lane)
    for _ in range(3):
        drain(lane)
        to_next(db)
    assert states(db) == ["delivered"]
    assert len(receiver.requests) == 3
    assert len(set(receiver.ids)) == 1
    assert len({request.body for request in receiver.requests}) == 1
    times = [int(request.headers["webhook-timestamp"]) for request in receiver.requests]
    assert times[2] - times[1] >= 300


@pytest.mark.parametrize(
    ("status", "most", "state"),
    [
        pytest.param(400, 3, "enabled", id="bad-request"),
        pytest.param(404, 3, "enabled", id="not-found"),
        pytest.param(422, 3, "enabled", id="unprocessable"),
        pytest.param(410, 1, "disabled_gone", id="gone"),
        pytest.param(401, 8, "enabled", id="unauthorized-is-retried"),
        pytest.param(302, 8, "enabled", id="redirect-is-a-failure"),
        pytest.param(500, 8, "enabled", id="server-error"),
    ],
)
def test_how_often_it_is_tried(
    sqlite_db: Database, receiver: Receiver, status: int, most: int, state: str
) -> None:
    """Catches an endless retry, one that gives up early, and X25: 410 disables at once."""
    tell(sqlite_db)
    receiver.answer = lambda _request: _reply(status)
    lane = lane_to(sqlite_db, endpoint_to(receiver.port))
    for _ in range(12):
        drain(lane)
        to_next(sqlite_db)
    assert len(receiver.requests) == most
    assert states(sqlite_db) == ["dead"]
    assert health_of(sqlite_db).state == state


def test_redirects_are_not_followed(sqlite_db: Database, receivers: Start) -> None:
    """Catches B27: a 302 to an internal service."""
    first, second = receivers(), receivers()
    first.answer = lambda _request: _reply(302, location=f"http://127.0.0.1:{second.port}/")
    tell(sqlite_db)
    drain(lane_to(sqlite_db, endpoint_to(first.port)))
    assert (len(first.requests), len(second.requests)) == (1, 0)
    assert states(sqlite_db) == ["retry_wait"]


def test_order_per_subject(db: Database, receiver: Receiver) -> None:
    """Catches B22: a later message of a subject overtakes one that is retried."""
    first = fire(db, "e1")
    second = tell(db, "alert.reminder", alerts=[{"episode": "e1"}])
    other = fire(db, "e2", subject="nightly/int8")
    receiver.statuses(500, 200)
    lane = lane_to(db, endpoint_to(receiver.port))
    drain(lane)
    assert receiver.ids == [first, other]
    later(db, seconds=10)
    drain(lane)
    assert receiver.ids == [first, other, first, second]


def test_resolved_before_it_was_told(db: Database, closed_port: int) -> None:
    """Catches X17: a resolve that is sent to somebody who never heard of the alert."""
    fire(db, "e1")
    lane = lane_to(db, endpoint_to(closed_port))
    drain(lane)
    assert not rows(db)[0].left_machine
    resolve(db, "e1")
    assert states(db) == ["suppressed", "suppressed"]


def test_resolved_after_it_may_have_arrived(db: Database, receiver: Receiver) -> None:
    """Catches B21: a firing message that timed out was perhaps read; its end must be told."""
    fire(db, "e1")
    receiver.statuses(500, 200)
    lane = lane_to(db, endpoint_to(receiver.port))
    drain(lane)
    resolved = resolve(db, "e1")
    assert states(db) == ["suppressed", "pending"]
    drain(lane)
    assert receiver.ids[1:] == [resolved]


def test_resolved_while_it_is_being_sent(db: Database, receiver: Receiver) -> None:
    """Catches B22: firing is retried after its resolved was created during the attempt."""
    fire(db, "e1")

    def answer(_request: Request) -> Reply:
        if len(receiver.requests) == 1:
            resolve(db, "e1")
        return _reply(500 if len(receiver.requests) == 1 else 200)

    receiver.answer = answer
    lane = lane_to(db, endpoint_to(receiver.port))
    drain(lane)
    later(db, hours=1)
    drain(lane)
    assert states(db) == ["suppressed", "delivered"]
    assert [request.document["type"] for request in receiver.requests] == [
        "alert.firing",
        "alert.resolved",
    ]


def test_excess_is_grouped_not_lost(db: Database, receiver: Receiver) -> None:
    """Catches an alert storm that floods a chat room, or loses what is beyond its rate."""
    ids = [fire(db, f"e{i}", subject=f"check{i}") for i in range(30)]
    lane = lane_to(db, endpoint_to(receiver.port, rate_per_minute=4))
    assert drain(lane) == 2
    kinds = [request.document["type"] for request in receiver.requests]
    assert kinds == ["alert.firing", "digest"]
    digest = receiver.requests[1].document["data"]
    assert [ids[0], *(one["id"] for one in digest["messages"])] == ids
    assert set(states(db)) == {"delivered"}


def test_what_was_tried_keeps_its_id(db: Database, receiver: Receiver) -> None:
    """Catches B25: a message that was perhaps received and comes again inside a digest."""
    tried = fire(db, "e0", subject="s0")
    receiver.statuses(500, 200)
    lane = lane_to(db, endpoint_to(receiver.port, rate_per_minute=2))
    drain(lane)
    follower = tell(db, "alert.reminder", "s0", alerts=[{"episode": "e0"}])
    others = [fire(db, f"e{i}", subject=f"s{i}") for i in (1, 2)]
    for _ in range(5):
        later(db, minutes=1)
        drain(lane)
    assert set(states(db)) == {"delivered"}
    assert receiver.ids[:2] == [tried, tried]
    carried = [
        one["id"]
        for request in receiver.requests[2:]
        for one in request.document["data"].get("messages", [{"id": request.id}])
    ]
    assert sorted(carried) == sorted([follower, *others])


def test_a_failed_digest_is_retried_as_it_was(db: Database, receiver: Receiver) -> None:
    """Catches a digest that is put together anew: another id, another body (B25)."""
    [fire(db, f"e{i}", subject=f"check{i}") for i in range(5)]
    receiver.statuses(200, 500, 200)
    lane = lane_to(db, endpoint_to(receiver.port, rate_per_minute=4))
    drain(lane)
    assert states(db).count("grouped") == 4
    fire(db, "late", subject="late")
    later(db, minutes=2)
    drain(lane)
    later(db, minutes=2)
    drain(lane)
    assert set(states(db)) == {"delivered"}
    digests = [one for one in receiver.requests if one.document["type"] == "digest"]
    assert digests[0].id == digests[1].id
    assert digests[0].body == digests[1].body


def test_never_more_than_the_rate(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a receiver that bans us: more than R messages within a minute."""
    for i in range(40):
        fire(sqlite_db, f"e{i}", subject=f"check{i}")
    endpoint = endpoint_to(receiver.port, rate_per_minute=6, format="pagerduty")
    lane = lane_to(sqlite_db, endpoint)
    sent = [drain(lane)]
    for _ in range(11):
        later(sqlite_db, seconds=5)
        sent.append(drain(lane))
    assert sum(sent) <= 6
    assert states(sqlite_db).count("dead") == 0


def test_looking_costs_no_rate(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a lane that uses up its rate by finding nothing to send."""
    lane = lane_to(sqlite_db, endpoint_to(receiver.port, rate_per_minute=2))
    for i in range(4):
        fire(sqlite_db, f"e{i}", subject=f"check{i}")
        assert drain(lane) == 1
        assert drain(lane) == 0
        later(sqlite_db, minutes=1)


def test_throttled_receiver_is_left_alone(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches 429 with Retry-After that slows one message and not the others."""
    for i in range(3):
        fire(sqlite_db, f"e{i}", subject=f"check{i}")
    receiver.answer = lambda _request: _reply(429, **{"retry-after": "30"})
    lane = lane_to(sqlite_db, endpoint_to(receiver.port))
    assert drain(lane) == 1
    later(sqlite_db, seconds=20)
    assert drain(lane) == 0
    receiver.statuses(200)
    later(sqlite_db, minutes=2)
    drain(lane)
    assert set(states(sqlite_db)) == {"delivered"}


def test_retry_after_is_followed_within_bounds(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a Retry-After of a year that loses a message, or one that is ignored."""
    tell(sqlite_db)
    receiver.answer = lambda _request: _reply(503, **{"retry-after": "31536000"})
    drain(lane_to(sqlite_db, endpoint_to(receiver.port)))
    [row] = rows(sqlite_db)
    assert row.next_at - row.created_at < timedelta(seconds=12)


def test_refused_address_is_not_tried_again(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches B27: a private address that is reached, or asked for again and again."""
    tell(sqlite_db)
    lane = lane_to(sqlite_db, endpoint_to(receiver.port, networks=()))
    drain(lane)
    later(sqlite_db, days=1)
    drain(lane)
    assert receiver.requests == []
    assert states(sqlite_db) == ["dead"]
    assert health_of(sqlite_db).state == "invalid"


def test_disabled_endpoint_gets_dead_letters(db: Database, receiver: Receiver) -> None:
    """Catches messages that wait for ever for an endpoint that is gone."""
    receiver.statuses(410)
    lane = lane_to(db, endpoint_to(receiver.port))
    tell(db)
    drain(lane)
    tell(db)
    drain(lane)
    assert states(db) == ["dead", "dead"]
    assert "410" in str(rows(db)[1].last_error)
    assert len(receiver.requests) == 1


def test_changed_setting_enables_again(db: Database, receiver: Receiver) -> None:
    """Catches an endpoint that stays disabled after its URL was corrected."""
    lane = lane_to(db, endpoint_to(receiver.port))
    receiver.statuses(410, 200)
    tell(db)
    drain(lane)
    know(db, lane.endpoint)
    assert health_of(db).state == "disabled_gone"
    moved = endpoint_to(receiver.port, path="/moved")
    lane = lane_to(db, moved)
    assert health_of(db).state == "enabled"
    tell(db)
    drain(lane)
    assert states(db) == ["dead", "delivered"]


@pytest.mark.slow
def test_five_days_without_success_disable(sqlite_db: Database, closed_port: int) -> None:
    """Catches an endpoint that is tried for months, and one that is disabled without notice."""
    lane = lane_to(sqlite_db, endpoint_to(closed_port))
    know(sqlite_db, endpoint_to(1, "other"))
    for night in range(7):
        fire(sqlite_db, f"e{night}", subject=f"night{night}")
        for _ in range(4):
            drain(lane)
            later(sqlite_db, hours=6)
    assert health_of(sqlite_db).state == "disabled_auto"
    told = {row.event_id for row in rows(sqlite_db, endpoint="other")}
    for kind in ("endpoint.failing", "endpoint.disabled"):
        [event] = events(sqlite_db, kind)
        assert event.id in told
    assert not rows(sqlite_db, endpoint="hook", subject="endpoint:hook")


def test_exhaustion_is_told_once_per_streak(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a flood of notices when a hundred messages die together."""
    receiver.statuses(404)
    lane = lane_to(sqlite_db, endpoint_to(receiver.port))
    know(sqlite_db, endpoint_to(1, "other"))
    for i in range(4):
        fire(sqlite_db, f"e{i}", subject=f"check{i}")
    for _ in range(5):
        drain(lane)
        later(sqlite_db, hours=1)
    assert states(sqlite_db, endpoint="hook") == ["dead"] * 4
    [notice] = events(sqlite_db, "endpoint.exhausted")
    assert json.loads(notice.body)["data"]["endpoint"] == "hook"


def test_success_ends_the_streak(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a streak that survives a success, and a ratio that never recovers."""
    receiver.statuses(500, 500, 200)
    lane = lane_to(sqlite_db, endpoint_to(receiver.port))
    tell(sqlite_db)
    ratios = []
    for _ in range(3):
        drain(lane)
        ratios.append(health_of(sqlite_db).failure_ratio)
        later(sqlite_db, hours=1)
    assert ratios == pytest.approx([0.2, 0.36, 0.288])
    health = health_of(sqlite_db)
    assert (health.num_failures, health.failing_since) == (0, None)
    assert health.last_success_at is not None


def test_enabling_by_hand(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches an endpoint that can't be brought back."""
    lane = lane_to(sqlite_db, endpoint_to(receiver.port))
    receiver.statuses(410, 200)
    tell(sqlite_db)
    drain(lane)
    assert enable_endpoint(sqlite_db, "hook", "ann").state == "disabled_gone"
    tell(sqlite_db)
    drain(lane)
    assert states(sqlite_db) == ["dead", "delivered"]


def test_late_sender_changes_nothing(db: Database, receiver: Receiver) -> None:
    """Catches a paused process that overwrites what another has delivered since (fencing)."""
    tell(db)
    lane = lane_to(db, endpoint_to(receiver.port))
    held = claim(db, lane.endpoint)
    assert held is not None
    later(db, minutes=3)
    with db.writer() as session:
        assert take_back(session) == 1
    drain(lane)
    assert states(db) == ["delivered"]
    receiver.statuses(500)
    assert lane.send(held) is None
    assert states(db) == ["delivered"]
    assert [one.error_code for one in attempts(db)] == ["lease_lost", None]
    assert len(set(receiver.ids)) == 1


def test_unknown_endpoint_is_not_synced_twice(db: Database) -> None:
    """Catches a second deliverer that resets what the first one has learned."""
    endpoint = endpoint_to(1)
    know(db, endpoint)
    with db.writer() as session:
        sync_endpoints(session, {"hook": endpoint.settings_sha, "new": "0"})
    assert health_of(db, "new").state == "enabled"


def _reply(status: int, **headers: str) -> Reply:
    return Reply(status, headers)
