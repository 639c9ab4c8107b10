"""What the other endpoints are told about one that fails, and about its recovery."""

from collections.abc import Collection, Mapping

from sqlalchemy.orm import Session

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery import health
from quantwatch.delivery.health import Health
from quantwatch.delivery.outcomes import Outcome
from quantwatch.store import clock
from quantwatch.store.deliveries import Message
from quantwatch.store.endpoints import enabled_names, told_since, told_since_end
from quantwatch.store.outbox import Event, publish
from quantwatch.store.suppression import RECOVERED

TEST = "test"
SEVERITY = "warning"


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


def _subject(name: str) -> str:
    return f"endpoint:{name}"


def _notice(session: Session, endpoint: Endpoint, kind: str, now: Health) -> dict[str, object]:
    words = {
        "endpoint.failing": f"has failed {now.num_failures} times in a row",
        "endpoint.exhausted": "did not get a message; it is a dead letter now",
        "endpoint.disabled": f"is disabled: {now.reason}",
        RECOVERED: "takes messages again",
    }
    since = now.failing_since
    data = {
        "title": f"Endpoint {endpoint.name} {words[kind]}",
        "severity": SEVERITY,
        "endpoint": endpoint.name,
        "host": endpoint.host,
        "state": now.state,
        "num_failures": now.num_failures,
        "failing_since": None if since is None else since.isoformat(),
        "command": "quantwatch deliveries list --state dead",
    }
    return {"type": kind, "timestamp": clock.now(session).isoformat(), "data": data}
