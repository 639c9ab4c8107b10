"""A test message: the same way as any other, within the rate, tried once."""

from collections.abc import Collection
from typing import Any

from sqlalchemy.orm import Session

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.claiming import bucket_of, hold
from quantwatch.delivery.client import Client
from quantwatch.delivery.lane import Lane
from quantwatch.delivery.notices import TEST
from quantwatch.errors import MonitorError
from quantwatch.store import clock, dead_letters, deliveries
from quantwatch.store.deliveries import Attempt, Message
from quantwatch.store.endpoints import lock_endpoint, sync_endpoints
from quantwatch.store.outbox import Event, publish
from quantwatch.store.session import Database


def send_test(
    db: Database,
    endpoint: Endpoint,
    client: Client | None = None,
    deaf: Collection[str] = (),
) -> Attempt:
    """Send a test message, also to a disabled endpoint; return what is told of it.

    Never what the receiver answered. The endpoints in `deaf` hear of no trouble. Raises
    MonitorError when it was not delivered, or when the endpoint's rate is used up.
    """
    with db.writer() as session:
        sync_endpoints(session, {endpoint.name: endpoint.settings_sha})
        message = _held(session, endpoint)
    settled = Lane(db, endpoint, client or Client(), deaf=deaf).send(message)
    with db.reader() as session:
        attempt = dead_letters.last_attempt(session, message)
    if settled is None or settled.outcome.next != "delivered":
        raise MonitorError(
            f"Endpoint {endpoint.name} ({endpoint.host}): the test was not delivered: "
            f"{attempt.error_code}; this test is not tried again."
        )
    return attempt


def _held(session: Session, endpoint: Endpoint) -> Message:
    """Publish the message and hold it in one transaction, so that no deliverer takes it."""
    state = lock_endpoint(session, endpoint.name)
    if bucket_of(session, state, endpoint).tokens < 1:
        raise MonitorError(
            f"Endpoint {endpoint.name} has had {endpoint.rate_per_minute} messages in this minute; "
            "wait a little."
        )
    event = Event(TEST, f"{TEST}:{endpoint.name}", body_at(clock.now(session).isoformat()))
    event_id = publish(session, event, [endpoint.name])
    one = deliveries.due_event(session, event_id, endpoint.name)
    message = hold(session, one, endpoint, state)
    assert message is not None
    return message


def body_at(timestamp: str) -> dict[str, Any]:
    """Return the document of a test."""
    data = {"version": 1, "title": "quantwatch: a test message", "severity": "info"}
    return {"type": TEST, "timestamp": timestamp, "data": data}
