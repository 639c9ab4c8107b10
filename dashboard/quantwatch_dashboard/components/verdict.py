"""Verdicts as color, icon and word: never color alone."""

from dataclasses import dataclass

from quantwatch.domain import RunStatus, Severity, Verdict
from quantwatch_dashboard.components.markup import Html, tag


@dataclass(frozen=True, slots=True)
class Mark:
    """Icon and word of a verdict or status."""

    icon: str
    word: str


_VERDICTS: dict[Verdict, Mark] = {
    Verdict.REGRESSION: Mark("✕", "Regression"),
    Verdict.INCONCLUSIVE: Mark("?", "Inconclusive"),
    Verdict.WARN: Mark("!", "Warning"),
    Verdict.IMPROVEMENT: Mark("↑", "Improvement"),
    Verdict.PASS: Mark("✓", "Pass"),
}
TROUBLE = tuple(
    status
    for status in RunStatus
    if status.is_ended and status not in (RunStatus.SUCCEEDED, RunStatus.SKIPPED)
)
"""Runs that began and came to no result: failed, cancelled, timed out, abandoned."""


def tone(verdict: Verdict | None) -> str:
    """Return the CSS class that sets the color of a verdict."""
    return f"qw-tone-{verdict.value}" if verdict is not None else "qw-tone-none"


def mark(status: RunStatus, verdict: Verdict | None) -> Mark:
    """Return how a run is shown; the monitor's own trouble never looks like a regression."""
    if verdict is not None and status == RunStatus.SUCCEEDED:
        return _VERDICTS[verdict]
    if status in TROUBLE:
        return Mark("⚡", f"Run {_words(status)}")
    if status == RunStatus.SUCCEEDED:
        return Mark("–", "No verdict")
    return Mark("–" if status.is_ended else "…", _words(status).capitalize())


def _words(status: RunStatus) -> str:
    return status.value.replace("_", " ")


def pill(shown: Mark, tone_class: str) -> Html:
    """Return icon and word in a color."""
    icon = tag("i", shown.icon, aria_hidden="true")
    return tag("span", icon, shown.word, class_=f"qw-badge {tone_class}")


def badge(status: RunStatus, verdict: Verdict | None) -> Html:
    """Return icon and word of a run in its color."""
    return pill(mark(status, verdict), tone(verdict))


def candidate_badge(verdict: Verdict | None) -> Html:
    """Return icon and word of one candidate; without a verdict it could not be measured."""
    if verdict is None:
        return pill(Mark("⚡", "Not measured"), tone(None))
    return badge(RunStatus.SUCCEEDED, verdict)


def severity_badge(severity: Severity) -> Html:
    """Return icon and word of an alert's severity, in the color of the verdict that it causes."""
    if severity == Severity.CRITICAL:
        return pill(Mark("✕", "Critical"), tone(Verdict.REGRESSION))
    return pill(Mark("!", "Warning"), tone(Verdict.WARN))


def verdict_word(name: str) -> str:
    """Return icon and word of a verdict by its value; ``*`` and ``none`` have words, too."""
    if name not in _VERDICTS:
        return {"*": "All", "none": "– No verdict"}.get(name, name)
    shown = _VERDICTS[Verdict(name)]
    return f"{shown.icon} {shown.word}"
