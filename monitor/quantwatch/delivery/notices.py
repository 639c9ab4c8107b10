"""What the other endpoints are told about one that fails, and about its recovery."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery import health
from quantwatch.delivery.health import Health
from quantwatch.delivery.outcomes import Outcome
from quantwatch.store import clock
from quantwatch.store.applied import removed_endpoints
from quantwatch.store.deliveries import Message
from quantwatch.store.endpoints import (
    enabled_names,
    lock_endpoint,
    told_since,
    told_since_end,
)
from quantwatch.store.outbox import Event, publish
from quantwatch.store.suppression import RECOVERED

TEST = "test"
SEVERITY = "warning"


@dataclass(frozen=True, slots=True)
class _Trouble:
    """What is said of an endpoint. The host of one that is gone is not known any more."""

    name: str
    host: str | None
    words: str
    ended: str | None
    state: str
    num_failures: int
    failing_since: datetime | None


def deaf(endpoints: Mapping[str, Endpoint]) -> frozenset[str]:
    """Return which endpoints hear of no trouble with others: they take no warnings."""
    return frozenset(name for name, one in endpoints.items() if SEVERITY not in one.severities)


def worth_telling(
    session: Session, message: Message, before: Health, after: tuple[Health, Outcome]
) -> list[str]:
    """Return the types of what the others are told after an attempt to send a message.

    A lost notice or test is nothing to tell, and what got lost is told once per streak.
    """
    now, outcome = after
    types = list(health.notices(before, now, outcome))
    if "endpoint.exhausted" in types:
        own = message.type == TEST or message.type.startswith("endpoint.")
        subject = _subject(message.endpoint)
        if own or told_since(session, subject, "endpoint.exhausted", now.failing_since):
            types.remove("endpoint.exhausted")
    return types


def tell(
    session: Session, endpoint: Endpoint, types: Collection[str], now: Health, deaf: Collection[str]
) -> None:
    """Tell the other endpoints; of a recovery those that were told of the trouble."""
    subject = _subject(endpoint.name)
    for kind in types:
        if kind == RECOVERED:
            others = told_since_end(session, subject, RECOVERED)
            if not others:
                continue
        else:
            others = enabled_names(session) - {endpoint.name} - set(deaf)
        event = Event(kind, subject, _notice(session, endpoint, kind, now))
        publish(session, event, sorted(others))


def end_removed(session: Session, configured: Collection[str]) -> int:
    """End what was told of endpoints that the configuration no longer has; return how many.

    No message gets through to them any more, so nothing else would. One that is disabled and still
    configured is left open: somebody has to decide what becomes of it.
    """
    ended = 0
    for name in removed_endpoints(session):
        others = told_since_end(session, _subject(name), RECOVERED) & set(configured)
        if not others:
            continue
        row = lock_endpoint(session, name)
        words = "is no longer in the configuration: nothing is sent to it any more"
        known = row.state, row.num_failures, row.failing_since
        body = _body(session, RECOVERED, _Trouble(name, None, words, "removed", *known))
        publish(session, Event(RECOVERED, _subject(name), body), sorted(others))
        ended += 1
    return ended


def _subject(name: str) -> str:
    return f"endpoint:{name}"


def _notice(session: Session, endpoint: Endpoint, kind: str, now: Health) -> dict[str, object]:
    words = {
        "endpoint.failing": f"has failed {now.num_failures} times in a row",
        "endpoint.exhausted": "did not get a message; it is a dead letter now",
        "endpoint.disabled": f"is disabled: {now.reason}",
        RECOVERED: "takes messages again",
    }
    known = now.state, now.num_failures, now.failing_since
    ended = "recovered" if kind == RECOVERED else None
    trouble = _Trouble(endpoint.name, endpoint.host, words[kind], ended, *known)
    return _body(session, kind, trouble)


def _body(session: Session, kind: str, trouble: _Trouble) -> dict[str, object]:
    since = trouble.failing_since
    data = {
        "title": f"Endpoint {trouble.name} {trouble.words}",
        "resolve_reason": trouble.ended,
        "severity": SEVERITY,
        "endpoint": trouble.name,
        "host": trouble.host,
        "state": trouble.state,
        "num_failures": trouble.num_failures,
        "failing_since": None if since is None else since.isoformat(),
        "command": "quantwatch deliveries list --state dead",
    }
    return {"type": kind, "timestamp": clock.now(session).isoformat(), "data": data}
