"""A body of one's own: what the variables of docs/webhooks.md are for one message."""

from typing import Any

from quantwatch.config.template_variables import VARIABLES
from quantwatch.config.templates import Template
from quantwatch.delivery.formats.chat import plain_text
from quantwatch.delivery.formats.content import Content
from quantwatch.domain import Json

SHOW_MEMBERS = frozenset({"document", "messages", "text"})
"""Variables that tell of every message of a digest."""


def render(content: Content, template: Template) -> bytes:
    """Return the filled template; the same for every attempt."""
    return template.filled(variables(content))


def variables(content: Content) -> dict[str, Any]:
    """Return every variable of a message; None for what it doesn't have."""
    known = _of_event(content) | _of_alert(content) | _whole(content)
    return {name: known.get(name) for name in VARIABLES}


def shows_members(template: Template) -> bool:
    """Say whether a digest in this template tells of every message that it carries."""
    return not SHOW_MEMBERS.isdisjoint(template.names)


def _of_event(content: Content) -> dict[str, Any]:
    # What needs no other name than it has in the document: check, culprit, link, …
    alike = {name: content.data.get(name) for name in VARIABLES.keys() & content.data.keys()}
    return alike | {
        "version": 1,
        "event.id": content.event_id,
        "event.type": content.type,
        "event.subject": content.subject,
        "event.time": content.timestamp or None,
        "state": _state(content),
        "severity": content.severity,
        "title": content.title,
        "num_alerts": len(content.alerts) + int(content.data.get("more_alerts") or 0),
        "num_messages": len(content.messages),
    }


def _of_alert(content: Content) -> dict[str, Any]:
    """Return what is said of the first alert and of the worst place."""
    first = next(iter(content.alerts), {})
    worst: Json = next(iter(content.data.get("scopes") or []), {})
    found = {f"alert.{name}": value for name, value in first.items()}
    return found | {f"worst.{name}": value for name, value in worst.items()}


def _whole(content: Content) -> dict[str, Any]:
    timestamp = content.timestamp or None
    lists = ("alerts", "scopes", "changed", "messages")
    return {name: content.data.get(name) or [] for name in lists} | {
        "document": {"type": content.type, "timestamp": timestamp, "data": content.data},
        "text": plain_text(content),
    }


def _state(content: Content) -> str:
    if content.type == "test":
        return "test"
    return "resolved" if content.is_over else "firing"
