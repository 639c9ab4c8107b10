"""Chat rooms: Slack (blocks), Discord (embeds), Teams (an adaptive card), each with its limits."""

import re
from collections.abc import Iterable
from typing import Any

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.formats.content import Content

_COLOURS = {"critical": 0xC0392B, "warning": 0xD68910, "info": 0x2471A3}
_OVER = 0x1E8449
_MARKDOWN = re.compile(r"([\\*_~`|>#\[\]()!])")


def slack(content: Content, _endpoint: Endpoint) -> dict[str, Any]:
    """Return Slack's message: a header, up to 40 sections of 3,000 letters, a link."""
    head = _cut(f"{_sign(content)} {content.title}", 150)
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": head, "emoji": False}}
    ]
    for name, text in content.facts[:40]:
        line = f"*{_slack(name, 100)}* {_slack(text, 2800)}"
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": line}})
    if content.link is not None:
        # An address may not hold what would end the link.
        link = _slack(re.sub(r"[|<>\s]", "", content.link), 2000)
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": f"<{link}|Open>"}})
    return {"text": _slack(f"{_sign(content)} {content.title}", 3000), "blocks": blocks}


def discord(content: Content, _endpoint: Endpoint) -> dict[str, Any]:
    """Return Discord's message: an embed of up to 25 fields, 6,000 letters; nobody is called."""
    title = _cut(_plain(f"{_sign(content)} {content.title}"), 256)
    left, fields = 5900 - len(title), []
    for name, text in content.facts[:25]:
        field = {"name": _cut(_plain(name), 256), "value": _cut(_plain(text), 1024)}
        left -= len(field["name"]) + len(field["value"])
        if left < 0:
            break
        fields.append(field)
    embed: dict[str, Any] = {
        "title": title,
        "color": _OVER if content.is_over else _COLOURS.get(content.severity, _COLOURS["info"]),
        "fields": fields,
    }
    if content.link is not None:
        embed["url"] = content.link
    return {"embeds": [embed], "allowed_mentions": {"parse": []}}


def teams(content: Content, _endpoint: Endpoint) -> dict[str, Any]:
    """Return the message of a Teams workflow: an adaptive card of at most about 20 kB."""
    facts, left = [], 20_000
    for name, text in content.facts:
        fact = {"title": _plain(_cut(name, 100)), "value": _plain(_cut(text, 1000))}
        left -= len((fact["title"] + fact["value"]).encode())
        if left < 0:
            break
        facts.append(fact)
    title = _plain(_cut(f"{_sign(content)} {content.title}", 500))
    body = [{"type": "TextBlock", "text": title, "wrap": True, "weight": "bolder"}]
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [*body, {"type": "FactSet", "facts": facts}],
    }
    if content.link is not None:
        card["actions"] = [{"type": "Action.OpenUrl", "title": "Open", "url": content.link}]
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def plain_text(content: Content) -> str:
    """Return the message as lines of plain text."""
    facts: Iterable[str] = (f"{name}: {text}" for name, text in content.facts)
    return "\n".join([*facts, *filter(None, [content.link])])


def _sign(content: Content) -> str:
    return "[resolved]" if content.is_over else f"[{content.severity}]"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _slack(text: str, most: int) -> str:
    """Escape what Slack reads as markup or as a call to somebody, and cut before that."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    while len(escaped) > most:
        text = _cut(text, max(1, len(text) - (len(escaped) - most)))
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped


def _plain(text: str) -> str:
    """Escape markdown, so that a name like layers.*.q_proj stays what it is."""
    return _MARKDOWN.sub(r"\\\1", text)
