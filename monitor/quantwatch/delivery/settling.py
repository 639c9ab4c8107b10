"""What an answer changes: the message, the endpoint, who else is told. One transaction."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from datetime import timedelta

from sqlalchemy.orm import Session

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery import health, notices
from quantwatch.delivery.backoff import wait_s
from quantwatch.delivery.client import Answer
from quantwatch.delivery.health import Health
from quantwatch.delivery.outcomes import Outcome, outcome_of
from quantwatch.delivery.rates import Bucket
from quantwatch.store import clock, failed_tasks
from quantwatch.store.deliveries import Attempt, Message, finish
from quantwatch.store.endpoints import EndpointState, lock_endpoint, save_endpoint
from quantwatch.store.lock_order import again
from quantwatch.store.outbox import suppress_untold
from quantwatch.store.session import Database

OPERATION = "delivery"
_STATES = {"delivered": "delivered", "retry": "retry_wait", "dead": "dead"}


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of an attempt."""

    outcome: Outcome
    state: str
    health: str


def settle(
    db: Database,
    message: Message,
    endpoint: Endpoint,
    answer: Answer,
    chance: float,
    deaf: Collection[str] = (),
) -> Settled | None:
    """Write down an attempt and all that follows from it; None when the lease was lost.

    `chance` in [0, 1) spreads the next attempt. The endpoints in `deaf` hear of no trouble with
    this one.
    """
    outcome = outcome_of(answer, message.attempt, once=message.type == notices.TEST)
    judged = outcome, answer
    # A message that was sent, and of which nothing is written down, would be sent again.
    return again(lambda: _settle(db, message, endpoint, judged, chance, deaf))


def _settle(
    db: Database,
    message: Message,
    endpoint: Endpoint,
    judged: tuple[Outcome, Answer],
    chance: float,
    deaf: Collection[str],
) -> Settled | None:
    outcome, answer = judged
    with db.writer() as session:
        row = lock_endpoint(session, endpoint.name)
        before = _health(row)
        attempt = _attempt(session, message, judged, before.failure_ratio, chance)
        if not finish(session, message, attempt):
            return None
        now = health.after(before, outcome, clock.now(session))
        _save(session, row, now, outcome, answer)
        _count(session, message, outcome, answer)
        if outcome.next != "delivered":
            suppress_untold(session, endpoint.name, message.subject)
        types = notices.worth_telling(session, message, before, (now, outcome))
        notices.tell(session, endpoint, types, now, deaf)
    return Settled(outcome, attempt.state, now.state)


def _attempt(
    session: Session, message: Message, judged: tuple[Outcome, Answer], ratio: float, chance: float
) -> Attempt:
    outcome, answer = judged
    wait = wait_s(
        message.attempt, failure_ratio=ratio, chance=chance, retry_after_s=answer.retry_after_s
    )
    return Attempt(
        state=_STATES[outcome.next],
        next_at=clock.now(session) + timedelta(seconds=wait),
        left_machine=answer.left_machine,
        duration_s=answer.duration_s,
        status=answer.status,
        error_code=outcome.error_code,
        error=None if outcome.next == "delivered" else answer.text or outcome.error_code,
    )


def _health(row: EndpointState) -> Health:
    return Health(**{field.name: getattr(row, field.name) for field in fields(Health)})


def _save(
    session: Session, row: EndpointState, now: Health, outcome: Outcome, answer: Answer
) -> None:
    known = {field.name: getattr(now, field.name) for field in fields(Health)}
    if now.last_success_at is None:
        known["last_success_at"] = row.last_success_at
    bucket = Bucket(row.tokens, row.tokens_at)
    if outcome.effect == "throttle":
        bucket = bucket.paused(clock.now(session), answer.retry_after_s)
    save_endpoint(session, replace(row, **known, tokens=bucket.tokens, tokens_at=bucket.at))


def _count(session: Session, message: Message, outcome: Outcome, answer: Answer) -> None:
    """Keep the table of failed operations: one subject per event and endpoint."""
    subject = f"{message.event_id} to {message.endpoint}"
    if outcome.error_code is None:
        failed_tasks.resolve(session, OPERATION, subject)
    else:
        words = answer.text or outcome.error_code
        failed_tasks.note_failure(session, OPERATION, outcome.error_code, subject, words)
