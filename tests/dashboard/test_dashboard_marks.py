"""Marks: how a run ended, and checks whose models may run their own code."""

import pytest

from quantwatch.domain import RunStatus, Verdict
from quantwatch_dashboard.components.facts import own_code
from quantwatch_dashboard.logic.marks import Mark, mark

_TOLD = {
    RunStatus.QUEUED: Mark("…", "Queued"),
    RunStatus.CLAIMED: Mark("…", "Claimed"),
    RunStatus.PREPARING: Mark("…", "Preparing"),
    RunStatus.MEASURING: Mark("…", "Measuring"),
    RunStatus.FINALIZING: Mark("…", "Finalizing"),
    RunStatus.SUCCEEDED: Mark("–", "No verdict"),
    RunStatus.FAILED: Mark("⚡", "Run failed"),
    RunStatus.TIMED_OUT: Mark("⚡", "Run timed out"),
    RunStatus.CANCELLED: Mark("⚡", "Run cancelled"),
    RunStatus.ABANDONED: Mark("⚡", "Run abandoned"),
    RunStatus.SKIPPED: Mark("–", "Skipped"),
}


@pytest.mark.parametrize("status", RunStatus, ids=str)
def test_a_run_that_ended_never_looks_under_way(status: RunStatus) -> None:
    """Catches a run past its deadline with the icon of one that waits, and no word on why."""
    assert mark(status, None) == _TOLD[status]
    assert (mark(status, Verdict.REGRESSION).icon == "✕") == (status is RunStatus.SUCCEEDED)


def test_variants_with_code_of_their_own_are_named() -> None:
    """Catches an opt-in that nobody sees."""
    candidates = [{"name": "fused", "allow_code": True}, {"name": "int8", "allow_code": False}]
    config = {"reference": {"allow_code": True}, "candidates": candidates}
    assert list(own_code(config)) == [("runs its own code", "reference, fused")]


def test_other_checks_have_no_mark() -> None:
    """Catches a mark that is on everything, and a run without a configuration."""
    assert list(own_code({"reference": {}, "candidates": [{"name": "int8"}]})) == []
    assert list(own_code({})) == []
