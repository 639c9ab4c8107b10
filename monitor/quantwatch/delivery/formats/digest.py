"""Many messages in one: what goes beyond an endpoint's rate is put together, never dropped."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from quantwatch.store.deliveries import Due
from quantwatch.store.digests import DIGEST

MOST_MESSAGES = 50
MOST_BYTES = 100_000
"""Of the members' documents; one that is larger still goes alone."""


def members_of(waiting: Sequence[Due], most: int = MOST_MESSAGES) -> list[Due]:
    """Return which of the messages that wait, oldest first, one digest carries: `most` at most.

    What was tried keeps its own id, so it goes alone, and what follows it in its subject after it.
    When not all fit, subjects with something critical go first.
    """
    total = 0
    found: list[Due] = []
    for one in _urgent_first(_untried(waiting), most):
        total += len(one.body)
        if found and total > MOST_BYTES:
            break
        found.append(one)
    places = {one.delivery_id: place for place, one in enumerate(waiting)}
    return sorted(found, key=lambda one: places[one.delivery_id])


def _untried(waiting: Sequence[Due]) -> list[Due]:
    alone: set[str] = set()
    found: list[Due] = []
    for one in waiting:
        if one.attempts or one.type == DIGEST or one.subject in alone:
            alone.add(one.subject)
        else:
            found.append(one)
    return found


def _urgent_first(messages: list[Due], most: int) -> list[Due]:
    """Return so many, each subject's in their order."""
    size = sum(len(one.body) for one in messages)
    if len(messages) <= most and size <= MOST_BYTES:
        return messages
    urgent = {one.subject for one in messages if _severity(json.loads(one.body)) == "critical"}
    return sorted(messages, key=lambda one: one.subject not in urgent)[:most]


def _severity(document: dict[str, Any]) -> str:
    return str((document.get("data") or {}).get("severity"))


def digest_body(members: Sequence[Due], at: datetime) -> dict[str, Any]:
    """Return the document of a digest: the members' documents with their ids, in order."""
    messages = [
        {**json.loads(one.body), "id": one.event_id, "type": one.type, "subject": one.subject}
        for one in members
    ]
    severities = set(map(_severity, messages))
    return {
        "type": "digest",
        "timestamp": at.isoformat(timespec="seconds").replace("+00:00", "Z"),
        "data": {
            "version": 1,
            "title": f"{len(messages)} messages in one, because there were so many",
            "severity": "critical" if "critical" in severities else "warning",
            "messages": messages,
        },
    }
