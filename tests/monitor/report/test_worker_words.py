"""Who measured a run's batches, in one sentence that every report shows."""

from typing import Any

import pytest

from quantwatch.report import html, markdown
from quantwatch.report.words import worker_words

TOLD: dict[str, Any] = {
    "executor": "local",
    "shards": 2,
    "threads": 1,
    "notes": [],
    "retried": 0,
    "lost": [],
    "peak_memory_bytes": [10, 20],
}
LOST = ["worker 1 (process 77) was killed by SIGKILL"]
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "as planned": (TOLD, "2 processes of 1 thread (local)"),
    "capped": (
        {**TOLD, "shards": 1, "threads": 4, "notes": ["the suite has 1 batch"]},
        "1 process of 4 threads (local); the suite has 1 batch",
    ),
    "killed": (
        {**TOLD, "executor": "ray", "retried": 1, "lost": LOST},
        "2 processes of 1 thread (ray); 1 batch measured again; worker 1 (process 77) was killed by "
        "SIGKILL",
    ),
    "killed and replaced": (
        {**TOLD, "retried": 1, "replaced": 1, "lost": LOST},
        "2 processes of 1 thread (local); 1 batch measured again; 1 worker replaced; worker 1 "
        "(process 77) was killed by SIGKILL",
    ),
    "by the run itself": ({}, None),
}


@pytest.mark.parametrize("what", CASES)
def test_the_sentence(what: str, make: Any) -> None:
    """Catches a worker that died unseen, and a line on runs that had none."""
    told, said = CASES[what]
    run = make.run(make.candidate(), capture={"sharding": told})
    assert worker_words(run) == said
    assert worker_words(make.run(make.candidate(), capture={})) is None
    for render in (markdown.render, html.render):
        assert ("measured by" in render(run)) == (said is not None)
