"""Alertmanager's webhook, version 4: what many receivers read already."""

import hashlib
from typing import Any

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.formats.content import Content, words
from quantwatch.telemetry import canonical_json

_NOT_OVER = "0001-01-01T00:00:00Z"
"""What Alertmanager says for "not ended"."""


def render(content: Content, endpoint: Endpoint) -> dict[str, Any]:
    """Return the document; a digest becomes one group of all its alerts."""
    parts = content.messages or (content,)
    alerts = [alert for part in parts for alert in _alerts(part)]
    firing = any(alert["status"] == "firing" for alert in alerts)
    hidden = sum(int(part.data.get("more_alerts") or 0) for part in parts)
    return {
        "version": "4",
        "groupKey": content.subject,
        "truncatedAlerts": hidden,
        "status": "firing" if firing else "resolved",
        "receiver": endpoint.name,
        "groupLabels": _common([_group(part) for part in parts]),
        "commonLabels": _common([alert["labels"] for alert in alerts]),
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": content.link or "",
        "notification_reason": str(content.data.get("reason") or content.type),
        "alerts": alerts,
    }


def _alerts(content: Content) -> list[dict[str, Any]]:
    if not content.alerts:
        labels = {"alertname": content.type, "severity": content.severity, **_group(content)}
        return [_alert(content, labels, content.title, (content.timestamp, not content.opens))]
    return [
        _alert(
            content,
            {
                "alertname": words(alert.get("rule")),
                "severity": words(alert.get("severity")),
                **_group(content),
            },
            words(alert.get("words")) or content.title,
            (words(alert.get("since")), alert.get("change") == "resolved"),
        )
        for alert in content.alerts
    ]


def _alert(
    content: Content, labels: dict[str, str], summary: str, lasted: tuple[str, bool]
) -> dict[str, Any]:
    since, over = lasted
    notes = {
        "summary": summary,
        "title": content.title,
        "command": words(content.data.get("command")),
    }
    # The severity may rise while the alert stays the same.
    identity = {name: text for name, text in labels.items() if name != "severity"}
    return {
        "status": "resolved" if over else "firing",
        "labels": labels,
        "annotations": {name: text for name, text in notes.items() if text},
        "startsAt": since,
        "endsAt": content.timestamp if over else _NOT_OVER,
        "generatorURL": content.link or "",
        "fingerprint": hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16],
    }


def _group(content: Content) -> dict[str, str]:
    found = {name: words(content.data.get(name)) for name in ("check", "candidate", "endpoint")}
    return {name: text for name, text in found.items() if text}


def _common(records: list[dict[str, str]]) -> dict[str, str]:
    """Return what all records say alike."""
    first, *rest = records or [{}]
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in rest)}
