"""Jitter that never changes: each check starts a little later, always by the same time."""

import hashlib
from datetime import timedelta


def jitter_of(check: str, most: timedelta) -> timedelta:
    """Return a check's jitter by its name: whole seconds from nothing to `most`, inclusive."""
    digest = hashlib.sha256(check.encode()).digest()
    return timedelta(seconds=int.from_bytes(digest[:8]) % (int(most.total_seconds()) + 1))
