"""Small shared instruments: canonical digests, run ids, the record of the environment."""

import hashlib
import json
import os
import time
from typing import Any

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no NaN: the form that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_sha(value: Any) -> str:
    """Return the SHA-256 (hex) of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def new_run_id() -> str:
    """Return a ULID: 48 bits of milliseconds, 80 random bits, Crockford base 32, sorts by time."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -5, -5))
