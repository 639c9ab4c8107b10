"""How a message looks at each kind of receiver. Rendering is pure: every attempt sends the same."""

from collections.abc import Callable

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.formats import alertmanager, chat, pagerduty, template
from quantwatch.delivery.formats.content import Content, read
from quantwatch.delivery.formats.digest import MOST_MESSAGES
from quantwatch.domain import Json
from quantwatch.store.deliveries import Message
from quantwatch.store.outbox import canonical

_FORMATS: dict[str, Callable[[Content, Endpoint], Json]] = {
    "alertmanager": alertmanager.render,
    "discord": chat.discord,
    "pagerduty": pagerduty.render,
    "slack": chat.slack,
    "teams": chat.teams,
}


def render(message: Message, endpoint: Endpoint) -> bytes:
    """Return the bytes to send: our own document as it was stored, or another format of it."""
    if endpoint.format == "quantwatch":
        return message.body
    if endpoint.template is not None:
        return template.render(content_of(message), endpoint.template)
    return canonical(_FORMATS[endpoint.format](content_of(message), endpoint))


def content_of(message: Message) -> Content:
    """Return what a message says."""
    return read(message.event_id, message.type, message.subject, message.body)


def most_in_digest(endpoint: Endpoint) -> int:
    """Return how many messages an endpoint is shown in one; an incident is one thing.

    A template that names no list of them gets each message alone: else it would tell of none.
    """
    if endpoint.template is not None and not template.shows_members(endpoint.template):
        return 1
    return _MOST_SHOWN.get(endpoint.format, MOST_MESSAGES)


_MOST_SHOWN = {"discord": chat.MOST_FIELDS, "pagerduty": 1, "slack": chat.MOST_SECTIONS}
