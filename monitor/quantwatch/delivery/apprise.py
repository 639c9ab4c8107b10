"""Apprise: many more receivers, WITHOUT delivery guarantee, signature or guarded socket.

Apprise opens its own connections and says only yes or no: what it calls sent may be lost.
"""

import time
from collections.abc import Callable
from typing import Any

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.client import Answer
from quantwatch.delivery.formats.chat import plain_text
from quantwatch.delivery.formats.content import Content
from quantwatch.errors import UserError

FORMAT = "apprise"


def load() -> Callable[[], Any]:
    """Return the class `apprise.Apprise`. Raises UserError when the extra is not installed."""
    try:
        from apprise import Apprise
    except ImportError as error:
        raise UserError(
            "format apprise needs an extra: pip install 'quantwatch[apprise]'"
        ) from error
    return Apprise  # type: ignore[no-any-return]


def notify(endpoint: Endpoint, content: Content) -> Answer:
    """Hand a message to Apprise. Raises UserError when it is missing or knows no such service."""
    began = time.monotonic()
    receivers = load()()
    if not receivers.add(endpoint.secrets[0].reveal()):
        raise UserError(f"endpoint {endpoint.name}: Apprise can't read its URL")
    kind = "success" if content.is_over else _KINDS.get(content.severity, "info")
    done = receivers.notify(title=content.title, body=plain_text(content), notify_type=kind)
    duration = time.monotonic() - began
    if done:
        return Answer(status=200, text="", duration_s=duration)
    return Answer(error_code="apprise", text="Apprise could not send it", duration_s=duration)


_KINDS = {"critical": "failure", "warning": "warning"}
