"""The rule on what changed beside the numbers: it fires although nothing became worse."""

from collections.abc import Iterator

from quantwatch.config.drift import matches_name
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import MODEL, Alert, CandidateResult, Severity
from quantwatch.domain.drift import changed, headline


def drift_alert(candidate: CandidateResult, rule: RuleConfig) -> Iterator[Alert]:
    """Yield one alert when anything changed that the rule watches; its value is how much did.

    Looks at the records of names among the candidate's differences from its baseline. Never
    critical: a drift is a cause, and no regression by itself.
    """
    records = changed(candidate.baseline_differences)
    found = [record for record in records if matches_name(rule.globs, record["name"])]
    if found:
        yield Alert(
            rule=rule.name,
            candidate=candidate.name,
            metric=rule.metric,
            statistic="count",
            scope=MODEL,
            value=float(len(found)),
            value_kind="finite",
            threshold=0.0,
            severity=Severity.WARNING,
            words=headline(found),
        )
