"""Who changed what and when, with what differs."""

from collections.abc import Iterable
from datetime import datetime, tzinfo
from itertools import islice

from quantwatch.config.apply import differences
from quantwatch.observability import redaction
from quantwatch.store.audit import AuditEntry
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, join, link, soft, sub, table, tag
from quantwatch_dashboard.components.words import moment

_MOST_DIFFERENCES = 8


def table_of(found: Iterable[AuditEntry], now: datetime, zone: tzinfo) -> Html:
    """Return who changed what and when, with what differs."""
    rows = (
        [
            tag("td", text.instant(entry.at, zone), sub(moment(entry.at, now, zone))),
            tag("td", entry.actor, class_="qw-name"),
            tag("td", entry.action, class_="qw-mono qw-small"),
            tag("td", link(entry.subject, "operations", show="audit", subject=entry.subject)),
            tag("td", _difference(entry), class_="qw-text"),
        ]
        for entry in found
    )  # fmt: skip
    return table(["When", "Who", "What", "About", "Before → after"], rows, "qw-audit")


def _difference(entry: AuditEntry) -> Html:
    found = list(islice(differences(entry.before or {}, entry.after or {}), _MOST_DIFFERENCES + 1))
    if not found:
        return soft(text.NONE)
    if entry.before is None:
        found = [one.replace(": null → ", ": ", 1) for one in found]
    lines = [
        tag("span", text.readable(redaction.scrub(one)), class_="qw-line")
        for one in found[:_MOST_DIFFERENCES]
    ]
    if len(found) > _MOST_DIFFERENCES:
        lines.append(tag("span", "… and more", class_="qw-sub"))
    return join(lines)
