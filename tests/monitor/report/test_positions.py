"""KL by position in every format: numbers, what is not measured, and nothing for short prompts."""

import json
from dataclasses import asdict, replace
from typing import Any

from quantwatch.domain import PositionRange, RunResult
from quantwatch.report import document, html, markdown

ROWS = [
    PositionRange("logit_kl", 0, 15, 32, 0, 0.25, 0.0125),
    PositionRange("logit_kl", 16, 31, 4, 1, None, None),
    PositionRange("lens_kl", 0, 15, 2, 0, 0.5, 0.25),
]


def run(make: Any, rows: list[PositionRange]) -> RunResult:
    candidate = make.candidate()
    told = {candidate.name: [asdict(row) for row in rows]}
    found: RunResult = replace(make.run(candidate), capture={"by_position": told})
    return found


def test_json_has_ranges_with_both_metrics(make: Any) -> None:
    """Catches NaN in JSON, and a lens KL that is 0 where none was read."""
    (candidate,) = json.loads(document.render(run(make, ROWS)))["candidates"]
    first, second = candidate["kl_by_position"]
    assert first == {
        "first": 0,
        "last": 15,
        "logit_kl": {"n": 32, "num_nonfinite": 0, "mean": 0.25, "se": 0.0125},
        "lens_kl": {"n": 2, "num_nonfinite": 0, "mean": 0.5, "se": 0.25},
    }
    assert second["lens_kl"] is None
    assert (second["logit_kl"]["mean"], second["logit_kl"]["mean_kind"]) == (None, "nan")
    assert second["logit_kl"]["se_kind"] == "missing"


def test_runs_from_before_have_an_empty_list(make: Any) -> None:
    """Catches a report that fails on an old run."""
    before = make.run(make.candidate())
    (candidate,) = json.loads(document.render(before))["candidates"]
    assert candidate["kl_by_position"] == []
    assert "by position" not in markdown.render(before)
    assert "by position" not in html.render(before)


def test_people_see_a_table_and_a_drawing(make: Any) -> None:
    """Catches columns of different ranges, and a table of one range that says nothing."""
    told = run(make, ROWS)
    lines = markdown.render(told).splitlines()
    head = next(line for line in lines if line.startswith("| position"))
    assert head == "| position | 0–15 | 16–31 |"
    assert lines[lines.index(head) + 2] == "| output KL | 0.25 | NaN |"
    assert lines[lines.index(head) + 3] == "| lens KL | 0.5 | – |"
    page = html.render(told)
    assert "Output KL by position in the prompt" in page
    assert "<td>0.25 ± 0.013</td><td>32</td>" in page
    assert "by position" not in markdown.render(run(make, ROWS[:1]))
