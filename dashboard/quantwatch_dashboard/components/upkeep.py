"""What somebody has to mend: failed tasks, and who changed what."""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, tzinfo
from itertools import islice
from typing import Any

from quantwatch.config.apply import differences
from quantwatch.observability import redaction
from quantwatch.store.audit import AuditEntry
from quantwatch.store.failed_tasks import FailedTask
from quantwatch_dashboard import text
from quantwatch_dashboard.components.checks import moment
from quantwatch_dashboard.components.markup import Html, join, link, table, tag

_MOST_DIFFERENCES = 8


def nothing(words: str) -> Html:
    """Return the line that stands where there is nothing to list, or nothing more."""
    return tag("p", words, class_="qw-soft")


def failed(found: Iterable[FailedTask], now: datetime, zone: tzinfo) -> Html:
    """Return one row per failed operation and thing it was about."""
    rows = (
        [
            tag("td", task.operation, class_="name"),
            tag("td", task.error_code, class_="qw-mono qw-small"),
            tag("td", task.subject, class_="qw-wrap"),
            tag("td", f"{task.attempts:,}", class_="n"),
            tag("td", moment(task.last_at, now, zone),
                tag("span", "since ", moment(task.first_at, now, zone), class_="qw-sub")),
            tag("td", text.readable(task.message), class_="words"),
        ]
        for task in found
    )  # fmt: skip
    heads = ["Operation", "Error", "About", tag("th", "Attempts", class_="n"), "Last", "Message"]
    return table(heads, rows, "qw-ops")


def changes(found: Iterable[AuditEntry], now: datetime, zone: tzinfo) -> Html:
    """Return who changed what and when, with what differs."""
    rows = (
        [
            tag("td", text.instant(entry.at, zone),
                tag("span", text.age(entry.at, now), class_="qw-sub")),
            tag("td", entry.actor, class_="name"),
            tag("td", entry.action, class_="qw-mono qw-small"),
            tag("td", link(entry.subject, "operations", part="Audit", subject=entry.subject)),
            tag("td", _difference(entry), class_="words"),
        ]
        for entry in found
    )  # fmt: skip
    return table(["When", "Who", "What", "About", "Before → after"], rows, "qw-audit")


def _difference(entry: AuditEntry) -> Html:
    found = list(islice(differences(entry.before or {}, entry.after or {}), _MOST_DIFFERENCES + 1))
    if not found:
        return tag("span", "–", class_="qw-soft")
    if entry.before is None:
        found = [one.replace(": null → ", ": ", 1) for one in found]
    lines = [
        tag("span", text.readable(redaction.scrub(one)), class_="qw-line")
        for one in found[:_MOST_DIFFERENCES]
    ]
    if len(found) > _MOST_DIFFERENCES:
        lines.append(tag("span", "… and more", class_="qw-sub"))
    return join(lines)


def document(found: Mapping[str, object]) -> Html:
    """Return a section of the configuration as it is stored, without what is left at nothing."""
    found = _without_nothing(found)
    # Nothing secret is stored; should a wrong key hold one all the same, it is not shown.
    shown = redaction.scrub(json.dumps(found, indent=2, ensure_ascii=False, default=str))
    return tag("pre", text.readable(shown), class_="qw-code qw-mono qw-tall")


def _without_nothing(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _without_nothing(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each not in (None, [], {})}
    return [_without_nothing(each) for each in value] if isinstance(value, list) else value
