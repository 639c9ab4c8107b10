"""What a message says, read from its document (docs/webhooks.md): title, facts, link, command."""

import json
from dataclasses import dataclass
from typing import Any

from quantwatch.store.suppression import RECOVERED, RESOLVED

_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Content:
    """A message as the formats need it. Nothing in it is escaped yet."""

    event_id: str
    type: str
    subject: str
    timestamp: str
    data: dict[str, Any]
    messages: tuple["Content", ...] = ()
    """What a digest carries."""

    @property
    def title(self) -> str:
        """One sentence."""
        return str(self.data.get("title") or "").strip() or self.type

    @property
    def severity(self) -> str:
        """critical, warning or info."""
        return str(self.data.get("severity") or "info")

    @property
    def is_over(self) -> bool:
        """Whether it tells that everything about its subject is resolved."""
        if self.messages:
            return all(message.is_over for message in self.messages)
        resolved = self.type == RESOLVED and self.data.get("reason") != "resolved_some"
        return resolved or self.type == RECOVERED

    @property
    def opens(self) -> bool:
        """Whether an incident may be opened for it: its end is told one day. A test has none."""
        return not self.is_over and self.type != "test"

    @property
    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that are named."""
        return list(self.data.get("alerts") or [])

    @property
    def link(self) -> str | None:
        """The page on it."""
        found = self.data.get("link")
        return str(found) if found else None

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Return what is known as pairs of a short name and a text, most telling first."""
        if self.messages:
            return [(_sign(one), one.title) for one in self.messages]
        data = self.data
        pairs = [
            *((str(alert.get("rule")), _alert(alert)) for alert in self.alerts[:_MOST_NAMED]),
            ("…", _more(len(self.alerts) - _MOST_NAMED, data.get("more_alerts"))),
            ("culprit", words(data.get("culprit"))),
            ("worst", _listed(data.get("scopes"), 3, data.get("more_scopes"))),
            ("baseline", words(data.get("baseline"))),
            ("changed", _listed(data.get("changed"), _MOST_NAMED, data.get("more_changed"))),
            ("since", words(data.get("since"))),
            ("first bad run", words(self.alerts[0].get("first_run")) if self.alerts else ""),
            ("lasted", _duration(data.get("duration_s"))),
            ("run", words(data.get("run"))),
            ("repeat", words(data.get("command"))),
        ]
        # Discord refuses a field without letters.
        return [(name.strip() or "–", text) for name, text in pairs if text.strip()]


def read(event_id: str, kind: str, subject: str, body: bytes) -> Content:
    """Read a stored document."""
    return _content(event_id, kind, subject, json.loads(body))


def words(value: Any) -> str:
    """Return any value of a document as a short text; nothing for what is not known."""
    if value is None or value == {}:
        return ""
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        known = {key: words(item) for key, item in value.items()}
        return ", ".join(f"{key} {text}" for key, text in known.items() if text)
    if isinstance(value, list):
        return " … ".join(map(words, value))
    return str(value)


def _content(event_id: str, kind: str, subject: str, document: dict[str, Any]) -> Content:
    data = document.get("data") or {}
    inner = tuple(
        _content(one["id"], one["type"], one["subject"], one) for one in data.get("messages") or ()
    )
    return Content(event_id, kind, subject, str(document.get("timestamp") or ""), data, inner)


def _alert(alert: dict[str, Any]) -> str:
    """Return what is told of one alert: words, value against threshold, interval."""
    if alert.get("change") == "resolved":
        now = words(alert.get("resolved_value"))
        return f"resolved: {alert.get('resolve_reason')}" + (f", now {now}" if now else "")
    value = words(alert.get("value")) or str(alert.get("value_kind") or "")
    measured = " ".join(filter(None, (words(alert.get("statistic")), words(alert.get("metric")))))
    text = words(alert.get("words")) or f"{measured} {value}, threshold {alert.get('threshold')}"
    interval = words(alert.get("interval"))
    return f"{text} [{interval}]" if interval else text


def _listed(items: list[Any] | None, most: int, more: Any) -> str:
    """Return the first items as a text that says how many there are beside them."""
    known = items or []
    named = [*map(words, known[:most]), _more(len(known) - most, more)]
    return "; ".join(filter(None, named))


def _more(left_out: int, uncounted: Any) -> str:
    """Say how many are not named: here, and in the document."""
    number = max(0, left_out) + int(uncounted or 0)
    return f"… and {number} more" if number else ""


def _sign(message: Content) -> str:
    return "resolved" if message.is_over else message.severity


def _duration(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return ""
    minutes = round(seconds / 60)
    days, hours, left = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else "", f"{left} min"]
    return " ".join(filter(None, parts))
