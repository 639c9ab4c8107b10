"""Where a reference's numbers came from, in one sentence that every report shows."""

from typing import Any

import pytest

from quantwatch.report.words import cache_words

AUDIT = {"part": "batch-00003 (24 tokens)", "num_values": 12345, "num_differing": 0}
USED: dict[str, Any] = {
    "origin": "cache",
    "is_wanted": True,
    "num_bytes": 2_000_000,
    "num_tokens": 100,
    "recorded_at": "2026-11-30T02:00:00+00:00",
    "uses": 3,
    "audit": AUDIT,
    "notes": [],
    "warnings": [],
}
NOTHING = {"num_bytes": None, "audit": None, "recorded_at": None, "uses": None}
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "read": (
        USED,
        "read from the cache (recorded 2026-11-30T02:00:00+00:00, use 3), 2 MB (20 kB per token); "
        "audit of batch-00003 (24 tokens): all 12,345 numbers are equal",
    ),
    "recorded": (
        {**USED, **NOTHING, "origin": "recorded", "num_bytes": 2_000_000},
        "run live and recorded, 2 MB (20 kB per token)",
    ),
    "busy": (
        {**USED, **NOTHING, "origin": "live", "notes": ["another process records it"]},
        "run live; another process records it",
    ),
    "differs": (
        {
            **USED,
            **NOTHING,
            "origin": "live",
            "audit": {**AUDIT, "num_differing": 1200},
            "warnings": ["it is dropped"],
        },
        "run live; audit of batch-00003 (24 tokens): 1,200 of 12,345 numbers differ; it is dropped",
    ),
    "not asked for": ({**USED, **NOTHING, "origin": "live", "is_wanted": False}, None),
    "an older run": ({}, None),
}


@pytest.mark.parametrize("what", CASES)
def test_the_sentence(what: str, make: Any) -> None:
    """Catches a cached night that reads like a live one, and a line on runs that know no cache."""
    used, said = CASES[what]
    run = make.run(make.candidate(), capture={"reference_cache": used} if used else {})
    assert cache_words(run) == said
