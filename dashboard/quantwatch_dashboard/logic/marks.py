"""Icon and word of verdicts and of runs, for pages and pictures alike."""

from typing import NamedTuple

from quantwatch.domain import RunStatus, Severity, Verdict


class Mark(NamedTuple):
    """Icon and word of a verdict or status."""

    icon: str
    word: str


VERDICTS: dict[Verdict, Mark] = {
    Verdict.REGRESSION: Mark("✕", "Regression"),
    Verdict.INCONCLUSIVE: Mark("?", "Inconclusive"),
    Verdict.WARN: Mark("!", "Warning"),
    Verdict.IMPROVEMENT: Mark("↑", "Improvement"),
    Verdict.PASS: Mark("✓", "Pass"),
}
SEVERITIES: dict[Severity, tuple[Mark, Verdict]] = {
    Severity.CRITICAL: (Mark("✕", "Critical"), Verdict.REGRESSION),
    Severity.WARNING: (Mark("!", "Warning"), Verdict.WARN),
}
"""Icon and word of an alert, and the verdict that it causes, whose color it has."""
TROUBLE = tuple(
    status
    for status in RunStatus
    if status.is_ended and status not in (RunStatus.SUCCEEDED, RunStatus.SKIPPED)
)
"""Runs that began and came to no result: failed, cancelled, timed out, abandoned."""


def mark(status: RunStatus, verdict: Verdict | None) -> Mark:
    """Return how a run is shown; the monitor's own trouble never looks like a regression."""
    if verdict is not None and status == RunStatus.SUCCEEDED:
        return VERDICTS[verdict]
    if status in TROUBLE:
        return Mark("⚡", f"Run {_words(status)}")
    if status == RunStatus.SUCCEEDED:
        return Mark("–", "No verdict")
    return Mark("–" if status.is_ended else "…", _words(status).capitalize())


def _words(status: RunStatus) -> str:
    return status.value.replace("_", " ")
