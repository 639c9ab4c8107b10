"""What is sent for a message: the body, and the headers beside those of every HTTP request."""

from dataclasses import dataclass

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery import signing
from quantwatch.delivery.formats import render
from quantwatch.store.deliveries import Message


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt. Headers may hold secrets, the body of PagerDuty its routing key."""

    headers: dict[str, str]
    body: bytes


def request_of(message: Message, endpoint: Endpoint) -> Request:
    """Return what an attempt sends: the body is the same each time, the signature's time is not."""
    body = render(message, endpoint)
    secrets = () if endpoint.format == "pagerduty" else endpoint.secrets
    signed = signing.signed_headers(message.event_id, message.at, body, secrets)
    own = {k: v if isinstance(v, str) else v.reveal() for k, v in endpoint.headers}
    kind = "application/json" if endpoint.template is None else endpoint.template.content_type
    # Ours last: nothing of a configuration takes the place of a signature.
    return Request(own | {"content-type": kind} | signed, body)
