"""Many messages in one: what goes beyond an endpoint's rate is put together, never dropped."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from quantwatch.store.deliveries import DIGEST, Due

MOST_MESSAGES = 50
MOST_BYTES = 100_000
"""Of the members' documents; one that is larger still goes alone."""


def members_of(waiting: Sequence[Due]) -> list[Due]:
    """Return which of the messages that wait, oldest first, one digest carries.

    What was tried keeps its own id, so it goes alone, and what follows it in its subject after it.
    """
    total = 0
    alone: set[str] = set()
    found: list[Due] = []
    for one in waiting[:MOST_MESSAGES]:
        if one.attempts or one.type == DIGEST or one.subject in alone:
            alone.add(one.subject)
            continue
        total += len(one.body)
        if found and total > MOST_BYTES:
            break
        found.append(one)
    return found


def digest_body(members: Sequence[Due], at: datetime) -> dict[str, Any]:
    """Return the document of a digest: the members' documents with their ids, in order."""
    messages = [
        {**json.loads(one.body), "id": one.event_id, "type": one.type, "subject": one.subject}
        for one in members
    ]
    severities = {str((one.get("data") or {}).get("severity")) for one in messages}
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
