"""Verdicts as color, icon and word: never color alone."""

from quantwatch.domain import RunStatus, Severity, Verdict
from quantwatch_dashboard.components.markup import Html, tag
from quantwatch_dashboard.logic.marks import SEVERITIES, VERDICTS, Mark, mark
from quantwatch_dashboard.text import ANY


def tone(verdict: Verdict | None) -> str:
    """Return the CSS class that sets the color of a verdict."""
    return f"qw-tone-{verdict.value}" if verdict is not None else "qw-tone-none"


def severity_tone(severity: Severity) -> str:
    """Return the CSS class that sets the color of the verdict that an alert causes."""
    return tone(SEVERITIES[severity][1])


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
    return pill(SEVERITIES[severity][0], severity_tone(severity))


def verdict_word(name: str) -> str:
    """Return icon and word of a verdict by its value; ``*`` and ``none`` have words, too."""
    known = {verdict.value: f"{m.icon} {m.word}" for verdict, m in VERDICTS.items()}
    return ({ANY: "All", "none": "– No verdict"} | known).get(name, name)
