"""Alerts as rows: rule, place, value against threshold, in words."""

from quantwatch.domain import Alert, RunResult
from quantwatch.report.words import alert_value, worst_first
from quantwatch_dashboard import text
from quantwatch_dashboard.components.candidates import swatch
from quantwatch_dashboard.components.markup import Html, table, tag
from quantwatch_dashboard.components.verdict import severity_badge

_HEADERS = ("Severity", "Candidate", "Where", "Rule")


def alert_table(result: RunResult) -> Html:
    """Return a run's alerts, critical ones first."""
    places = {c.name: i for i, c in enumerate(result.candidates)}
    rows = [_row(alert, places.get(alert.candidate, 0)) for alert in worst_first(result.alerts)]
    numbers = (tag("th", name, class_="n") for name in ("Value", "Threshold"))
    return table([*_HEADERS, *numbers, "In words"], rows, "qw-alerts")


def _row(alert: Alert, index: int) -> list[object]:
    value = text.plain(alert_value(alert))
    measured = tag("span", f"{alert.metric} · {alert.statistic}", class_="qw-sub")
    return [
        tag("td", severity_badge(alert.severity)),
        tag("td", swatch(index), alert.candidate, class_="name"),
        tag("td", alert.scope, class_="qw-mono qw-wrap"),
        tag("td", alert.rule, measured),
        tag("td", text.number(value), class_="n qw-hot"),
        tag("td", text.number(alert.threshold), class_="n"),
        tag("td", alert.words, class_="words qw-soft"),
    ]
