"""What is kept of a breach for the messages on it: scopes, interval, culprit, what changed."""

from collections.abc import Sequence
from typing import Any

from quantwatch.alerts.episodes import RunRef
from quantwatch.domain import Alert, CandidateResult, Json, RuleOutcome, RunResult
from quantwatch.domain.drift import changed, headline
from quantwatch.observability.redaction import scrubbed
from quantwatch.report.figures import Figures
from quantwatch.report.repeat import repeat_command
from quantwatch.report.words import alert_interval, explanation, worst_first

SCOPES = 10
CHANGES = 20
_FIGURES = ("metric", "statistic")


def evidence_of(result: RunResult, outcome: RuleOutcome, run: RunRef) -> dict[str, Any]:
    """Return what a rule's outcome in a run rests on, as strict JSON without secrets."""
    candidate = result.find(outcome.candidate)
    alerts = _breaches(result, outcome)
    changes = [] if candidate is None else changed(candidate.baseline_differences)
    figures = None if candidate is None else Figures(candidate)
    found: dict[str, Any] = scrubbed(
        {
            **_worst(alerts, figures),
            "scope": outcome.scope,
            "value": outcome.value,
            "value_kind": outcome.value_kind,
            "threshold": outcome.threshold,
            "words": outcome.words,
            "scopes": [_scope(alert, candidate) for alert in alerts[:SCOPES]],
            "more_scopes": max(0, len(alerts) - SCOPES),
            "culprit": None if candidate is None else explanation(candidate),
            "baseline": result.baseline_run_id,
            "rule_sha": outcome.rule_sha,
            "drift": headline(changes) or None,
            "changed": [_change(record) for record in changes[:CHANGES]],
            "more_changed": max(0, len(changes) - CHANGES),
            "run": result.run_id,
            "command": repeat_command(result),
            "confirmation": confirmed(run),
        }
    )
    return found


def confirmed(run: RunRef) -> str | None:
    """Return what is said of a breach that a confirmation run saw as well."""
    return None if run.confirms is None else f"confirmed by run {run.run_id}"


def of_service(check: str, outcome: RuleOutcome) -> dict[str, Any]:
    """Return what an alert about the check itself rests on: there is no measurement."""
    found: dict[str, Any] = scrubbed(
        {
            "value": outcome.value,
            "value_kind": outcome.value_kind,
            "threshold": outcome.threshold,
            "words": outcome.words,
            "command": f"quantwatch check run {check}",
        }
    )
    return found


def _breaches(result: RunResult, outcome: RuleOutcome) -> list[Alert]:
    named = [
        alert
        for alert in result.alerts
        if (alert.candidate, alert.rule) == (outcome.candidate, outcome.rule)
    ]
    return worst_first([alert for alert in named if alert.is_decided])


def _worst(alerts: Sequence[Alert], figures: Figures | None) -> dict[str, Any]:
    if not alerts:
        return {}
    interval = alert_interval(alerts[0], figures)
    return {
        **{name: getattr(alerts[0], name) for name in _FIGURES},
        "interval": None if interval is None else list(interval),
    }


def _scope(alert: Alert, candidate: CandidateResult | None) -> dict[str, Any]:
    row = None if candidate is None else candidate.find(alert.metric, alert.scope)
    return {
        "scope": alert.scope,
        "metric": alert.metric,
        "statistic": alert.statistic,
        "value": alert.value,
        "value_kind": alert.value_kind,
        "threshold": alert.threshold,
        "prompt": None if row is None else row.max_prompt,
        "position": None if row is None else row.max_position,
    }


def _change(record: Json) -> dict[str, Any]:
    return {name: record.get(name) for name in ("name", "part", "value", "baseline")}
