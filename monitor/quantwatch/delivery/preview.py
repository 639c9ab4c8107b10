"""What an endpoint would get, without sending it and without its secrets."""

import json
from dataclasses import dataclass

from quantwatch.config.endpoints import Endpoint
from quantwatch.config.secrets import Secret
from quantwatch.delivery import apprise
from quantwatch.delivery.formats import chat, content_of
from quantwatch.delivery.requests import request_of
from quantwatch.observability.redaction import HIDDEN
from quantwatch.store.deliveries import Message

_SIGNATURE = "webhook-signature"


@dataclass(frozen=True, slots=True)
class Preview:
    """Headers and body as they would be sent; in place of a secret stands [redacted]."""

    event: str
    headers: dict[str, str]
    body: str


def preview(message: Message, endpoint: Endpoint) -> Preview:
    """Return what an attempt to send a message would send. Nothing is sent."""
    if endpoint.format == apprise.FORMAT:
        # It has no request of ours: Apprise is handed a title and a text.
        content = content_of(message)
        body = f"{content.title}\n\n{chat.plain_text(content)}"
        return Preview(message.event_id, {}, body)
    request = request_of(message, endpoint)
    # A signature of made-up news would be as good as one of real news.
    hidden = {_SIGNATURE} | {name for name, value in endpoint.headers if isinstance(value, Secret)}
    headers = {k: HIDDEN if k in hidden else v for k, v in request.headers.items()}
    body = request.body.decode("utf-8")
    for secret in endpoint.secrets:
        # PagerDuty's key is part of the body.
        body = body.replace(json.dumps(secret.reveal(), ensure_ascii=False)[1:-1], HIDDEN)
    return Preview(message.event_id, headers, body)
