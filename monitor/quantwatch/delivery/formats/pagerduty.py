"""PagerDuty Events API v2: one incident per subject, closed when all of it is resolved."""

import hashlib
from typing import Any

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.formats.content import Content

_MOST_SUMMARY = 1024
_MOST_KEY = 255


def render(content: Content, endpoint: Endpoint) -> dict[str, Any]:
    """Return an event. The routing key is the endpoint's secret."""
    event: dict[str, Any] = {
        "routing_key": endpoint.secrets[0].reveal(),
        "event_action": "trigger" if content.opens else "resolve",
        "dedup_key": _key(content.subject),
        "payload": {
            "summary": _cut(content.title),
            "source": str(content.data.get("check") or "quantwatch"),
            "severity": content.severity if content.severity in ("critical", "warning") else "info",
            "timestamp": content.timestamp,
            "custom_details": dict(content.facts),
        },
        "client": "quantwatch",
    }
    if content.link is not None:
        event["links"] = [{"href": content.link, "text": "Open"}]
    return event


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SUMMARY else f"{text[: _MOST_SUMMARY - 1]}…"


def _key(subject: str) -> str:
    key = f"quantwatch:{subject}"
    if len(key) <= _MOST_KEY:
        return key
    return f"quantwatch:{hashlib.sha256(subject.encode()).hexdigest()}"
