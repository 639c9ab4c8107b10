"""Chat rooms: Slack (blocks), Discord (embeds), Teams (an adaptive card), each with its limits."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.formats.content import Content

MOST_FIELDS = 25
"""Discord's."""
MOST_SECTIONS = 40
"""Of Slack's 50 blocks."""
_MOST_LETTERS = 5900
_MOST_BYTES = 20_000
Pair = tuple[str, str]

_COLOURS = {"critical": 0xC0392B, "warning": 0xD68910, "info": 0x2471A3}
_OVER = 0x1E8449
_MARKDOWN = re.compile(r"([\\*_~`|>#\[\]()!])")


def slack(content: Content, _endpoint: Endpoint) -> dict[str, Any]:
    """Return Slack's message: a header, up to 40 sections of 3,000 letters, a link."""
    head = _cut(f"{_sign(content)} {content.title}", 150)
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": head, "emoji": False}}
    ]
    for name, text in _first(content.facts, MOST_SECTIONS):
        line = f"*{_cut(name, 100, _slack)}* {_cut(text, 2800, _slack)}"
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": line}})
    if content.link is not None:
        # An address may not hold what would end the link.
        link = _cut(re.sub(r"[|<>\s]", "", content.link), 2000, _slack)
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": f"<{link}|Open>"}})
    return {"text": _cut(f"{_sign(content)} {content.title}", 3000, _slack), "blocks": blocks}


def discord(content: Content, _endpoint: Endpoint) -> dict[str, Any]:
    """Return Discord's message: an embed of up to 25 fields, 6,000 letters; nobody is called."""
    title = _cut(f"{_sign(content)} {content.title}", 256, _plain)
    shown = _shared(_first(content.facts, MOST_FIELDS), (1024, _MOST_LETTERS - len(title)), len)
    fields = [{"name": name, "value": text} for name, text in shown]
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
    shown = _shared(content.facts, (1000, _MOST_BYTES), _num_bytes)
    facts = [{"title": name, "value": text} for name, text in shown]
    title = _cut(f"{_sign(content)} {content.title}", 500, _plain)
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


def _first(pairs: list[Pair], most: int) -> list[Pair]:
    """Return so many pairs; what is left out is counted."""
    if len(pairs) <= most:
        return pairs
    return [*pairs[: most - 1], ("…", f"… and {len(pairs) - most + 1} more")]


def _shared(pairs: list[Pair], most: tuple[int, int], size: Callable[[str], int]) -> list[Pair]:
    """Escape pairs and cut long texts, so that none of them is left out.

    `most` is how large one text may be and how large all are together; `size` measures.
    """
    each, room = most
    share = room // max(1, len(pairs))
    for limit in (each, share - share // 3):
        found = [
            (_cut(name, min(100, share // 3), _plain, size), _cut(text, limit, _plain, size))
            for name, text in pairs
        ]
        if sum(size(name) + size(text) for name, text in found) <= room:
            break
    return found


def _cut(
    text: str,
    most: int,
    escape: Callable[[str], str] = str,
    size: Callable[[str], int] = len,
) -> str:
    """Escape a text; before that, cut it so that it is no larger than `most`."""
    escaped, kept = escape(text), len(text)
    while size(escaped) > most:
        kept -= max(1, (size(escaped) - most) // 6)
        escaped = escape(f"{text[: kept - 1]}…")
    return escaped


def _num_bytes(text: str) -> int:
    # Half a surrogate pair, as token pieces have, is sent as an escape.
    return len(text.encode("utf-8", "backslashreplace"))


def _slack(text: str) -> str:
    """Escape what Slack reads as markup or as a call to somebody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _plain(text: str) -> str:
    """Escape markdown, so that a name like layers.*.q_proj stays what it is."""
    return _MARKDOWN.sub(r"\\\1", text)
