"""Which message an endpoint gets next: order, rate, digest, and what a disabled endpoint gets."""

from dataclasses import replace

from sqlalchemy.orm import Session

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.formats import most_in_digest
from quantwatch.delivery.formats.digest import MOST_MESSAGES, digest_body, members_of
from quantwatch.delivery.health import ENABLED
from quantwatch.delivery.rates import Bucket
from quantwatch.store import clock, dead_letters, deliveries, digests, outbox
from quantwatch.store.deliveries import Due, Message
from quantwatch.store.digests import DIGEST
from quantwatch.store.endpoints import EndpointState, lock_endpoint, save_endpoint
from quantwatch.store.session import Database
from quantwatch.telemetry import new_run_id

LEASE_S = 120.0
"""Far longer than a request may take: only a process that went away loses a lease."""


def is_due(db: Database, endpoint: Endpoint) -> bool:
    """Say whether anything waits that may be sent, without keeping writers out."""
    with db.reader() as session:
        return deliveries.is_due(session, endpoint.name)


def claim(db: Database, endpoint: Endpoint) -> Message | None:
    """Hold the next message for an endpoint; None when nothing may be sent now.

    What waits for a disabled endpoint becomes dead letters, which can be replayed.
    """
    with db.writer() as session:
        state = lock_endpoint(session, endpoint.name)
        if state.state != ENABLED:
            why = f"endpoint is {state.state}: {state.reason or 'no reason given'}"
            dead_letters.bury(session, dead_letters.to_endpoint(endpoint.name), why)
            return None
        bucket = bucket_of(session, state, endpoint)
        if bucket.at < state.tokens_at:
            # Counted when the clock was wrong: from now on it fills again.
            state = replace(state, tokens_at=bucket.at)
            save_endpoint(session, state)
        one = _next(session, endpoint, bucket) if bucket.tokens >= 1 else None
        return None if one is None else hold(session, one, endpoint, state)


def bucket_of(session: Session, state: EndpointState, endpoint: Endpoint) -> Bucket:
    """Return what is left of an endpoint's rate now."""
    counted = Bucket(state.tokens, state.tokens_at)
    return counted.refilled(endpoint.rate_per_minute, clock.now(session))


def hold(session: Session, one: Due, endpoint: Endpoint, state: EndpointState) -> Message | None:
    """Hold a message under a new lease and take it off the rate."""
    left = bucket_of(session, state, endpoint).spent()
    save_endpoint(session, replace(state, tokens=left.tokens, tokens_at=left.at))
    return deliveries.take(session, one, endpoint.name, token=new_run_id(), lease_s=LEASE_S)


def _next(session: Session, endpoint: Endpoint, bucket: Bucket) -> Due | None:
    """Return the oldest message, or a digest: with the last of the rate, or of a long queue."""
    most_shown = most_in_digest(endpoint)
    many = most_shown > 1 and (
        bucket.tokens < 2 or deliveries.is_due(session, endpoint.name, MOST_MESSAGES)
    )
    most = MOST_MESSAGES if many else 1
    waiting = deliveries.due(session, endpoint.name, clock.now(session), most)
    if not waiting or waiting[0].attempts or waiting[0].type == DIGEST:
        return waiting[0] if waiting else None
    members = members_of(waiting, most_shown)
    return _digest(session, members, endpoint) if len(members) > 1 else waiting[0]


def _digest(session: Session, members: list[Due], endpoint: Endpoint) -> Due:
    subject = f"{DIGEST}:{endpoint.name}"
    body = digest_body(members, clock.now(session))
    digest_id = outbox.publish(session, outbox.Event(DIGEST, subject, body), [endpoint.name])
    digests.group(session, [one.delivery_id for one in members], digest_id)
    return deliveries.due_event(session, digest_id, endpoint.name)
