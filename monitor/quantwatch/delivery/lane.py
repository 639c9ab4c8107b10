"""One endpoint's way out: claim, render, sign, send, settle. A slow receiver fills only its own."""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery import apprise
from quantwatch.delivery.claiming import claim, is_due
from quantwatch.delivery.client import Answer, Client
from quantwatch.delivery.formats import content_of
from quantwatch.delivery.requests import request_of
from quantwatch.delivery.settling import OPERATION, Settled, settle
from quantwatch.observability import logs, meters
from quantwatch.observability.redaction import scrub
from quantwatch.store.deliveries import Message
from quantwatch.store.session import Database

log = logs.get(__name__)


@dataclass
class Lane:
    """Sends what waits for one endpoint, one message at a time."""

    db: Database
    endpoint: Endpoint
    client: Client
    chance: Callable[[], float] = random.random
    """Spreads retries; in [0, 1)."""
    deaf: Collection[str] = ()
    """Endpoints that are not told when this one fails."""
    last_duration_s: float = field(default=0.0, init=False)
    """How long the receiver took last; faster ones go first."""

    def step(self) -> bool:
        """Send the next message that is due; False when nothing may be sent now."""
        message = claim(self.db, self.endpoint)
        if message is None:
            return False
        self.send(message)
        return True

    def drain(self, most: int, stop: Callable[[], bool] = lambda: False) -> int:
        """Send up to so many messages; return how many."""
        if not is_due(self.db, self.endpoint):
            return 0
        count = 0
        with self.db.kept_open():
            while count < most and not stop() and self.step():
                count += 1
        return count

    def send(self, message: Message) -> Settled | None:
        """Send a message that is held and write down what came of it; None: the lease was lost."""
        answer = self._answer(message)
        self.last_duration_s = answer.duration_s
        settled = settle(self.db, message, self.endpoint, answer, self.chance(), self.deaf)
        self._note(message, answer, settled)
        return settled

    def _answer(self, message: Message) -> Answer:
        endpoint = self.endpoint
        try:
            if endpoint.format == apprise.FORMAT:
                return apprise.notify(endpoint, content_of(message))
            request = request_of(message, endpoint)
            return self.client.post(endpoint, request.headers, request.body)
        except Exception as error:  # noqa: BLE001 - one bad message must not hold up the others
            log.error("message failed before it was sent", error=error, **_facts(message))
            text = scrub(f"{type(error).__name__}: {error}")
            return Answer(error_code="internal", text=text, left_machine=True)

    def _note(self, message: Message, answer: Answer, settled: Settled | None) -> None:
        outcome = "lease_lost" if settled is None else settled.state
        meters.DELIVERIES.labels(channel=self.endpoint.name, outcome=outcome).inc()
        if message.attempt > 1:
            meters.RETRIES.labels(operation=OPERATION).inc()
            meters.RETRY_LATENCY.labels(operation=OPERATION).observe(answer.duration_s)
        facts = _facts(message) | {"outcome": outcome, "status": answer.status}
        if outcome == "delivered":
            log.info("message delivered", **facts)
        else:
            log.warning("message not delivered", **facts, error_code=answer.error_code)


def _facts(message: Message) -> dict[str, object]:
    return {"event": message.event_id, "endpoint": message.endpoint, "attempt": message.attempt}
