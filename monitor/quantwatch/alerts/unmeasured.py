"""Alerts about a candidate that a run could not judge: the check succeeds and doesn't watch it."""

from quantwatch.config.rules import NOT_COMPARED, NOT_MEASURED
from quantwatch.domain import RuleOutcome, Severity


def not_measured(candidate: str, why: str | None, limit: int) -> RuleOutcome:
    """Return whether a candidate was measured, and `why` not: it failed, or the reference is NaN.

    It fires in the `limit`-th run in a row, as failed runs do.
    """
    return _outcome(NOT_MEASURED, candidate, why, limit)


def not_compared(candidate: str, why: str | None, limit: int) -> RuleOutcome:
    """Return whether a candidate was compared, and `why` not: the baseline is of something else."""
    return _outcome(NOT_COMPARED, candidate, why, limit)


def _outcome(rule: str, candidate: str, why: str | None, limit: int) -> RuleOutcome:
    return RuleOutcome(
        rule=rule,
        candidate=candidate,
        rule_sha=f"{rule} 1",
        severity=Severity.WARNING,
        outcome="clear" if why is None else "breach",
        enter_runs=limit,
        leave_runs=1,
        scope=None,
        value=None,
        value_kind="missing",
        threshold=None,
        words=why or "",
    )
