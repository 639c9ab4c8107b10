"""Alerts as rows: rule, place, value against threshold, in words."""

from collections.abc import Iterable, Sequence

from quantwatch.domain import Alert
from quantwatch.report.words import UNDECIDED, alert_value, rule_name, worst_first
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, numbers, table, tag
from quantwatch_dashboard.components.verdict import pill, severity_badge, tone
from quantwatch_dashboard.components.words import swatch
from quantwatch_dashboard.logic.marks import Mark

_OPEN = Mark("?", UNDECIDED.capitalize())
_HEADERS = ("Severity", "Candidate", "Place", "Rule")


def alert_table(alerts: Sequence[Alert], candidates: Iterable[str]) -> Html:
    """Return one row per rule and candidate, critical ones first: its worst scope and the rest."""
    places = {name: i for i, name in enumerate(candidates)}
    groups: dict[tuple[str, str], list[Alert]] = {}
    for alert in worst_first(alerts):
        groups.setdefault((alert.rule, alert.candidate), []).append(alert)
    rows = [_row(group, places.get(group[0].candidate, 0)) for group in groups.values()]
    return table([*_HEADERS, *numbers("Value", "Threshold"), "In words"], rows)


def _row(group: list[Alert], index: int) -> list[object]:
    alert, *others = group
    measured = tag("span", f"{alert.metric} · {alert.statistic}", class_="qw-sub")
    return [
        tag("td", _badge(alert)),
        tag("td", swatch(index), alert.candidate, class_="qw-name"),
        tag("td", tag("span", alert.scope, class_="qw-mono"), class_="qw-wrap"),
        tag("td", rule_name(alert), measured),
        tag("td", _value(alert), class_="qw-n qw-hot"),
        tag("td", text.number(alert.threshold), class_="qw-n"),
        tag("td", alert.words, _others(others), class_="qw-text qw-soft"),
    ]


def _badge(alert: Alert) -> Html:
    """Return the severity; what can't be decided is no breach, and doesn't look like one."""
    return severity_badge(alert.severity) if alert.is_decided else pill(_OPEN, tone(None))


def _others(others: list[Alert]) -> Html:
    """Return the group's other scopes, folded: one bad layer tends to spoil all that follow."""
    if not others:
        return Html("")
    summary = tag("summary", f"and at {text.plural(len(others), 'more place', 'more places')}")
    listed = ", ".join(f"{alert.scope} {_value(alert)}" for alert in others)
    return tag("details", summary, tag("span", listed, class_="qw-small"))


def _value(alert: Alert) -> str:
    return text.number(text.plain(alert_value(alert)))
