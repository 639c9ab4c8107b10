"""The health alert: runs that failed in a row. Infrastructure trouble never goes anywhere else."""

from quantwatch.domain import RuleOutcome, Severity

HEALTH = "health"
"""Name of the rule; its candidate is empty, because it is about the check itself."""
_SHA = "health 1"


def health(
    unhealthy_runs: int, limit: int, trouble: str = "", *, quarantined: bool = False
) -> RuleOutcome:
    """Return the outcome of so many failed runs in a row; `trouble` says how the last one ended.

    A check in quarantine is unhealthy however few runs it took.
    """
    breach = quarantined or unhealthy_runs >= limit
    outcome = "breach" if breach else "between" if unhealthy_runs else "clear"
    return RuleOutcome(
        rule=HEALTH,
        candidate="",
        rule_sha=_SHA,
        severity=Severity.WARNING,
        outcome=outcome,  # type: ignore[arg-type]
        enter_runs=1,
        leave_runs=1,
        scope=None,
        value=float(unhealthy_runs),
        value_kind="finite",
        threshold=float(limit),
        words=_words(unhealthy_runs, trouble, quarantined),
    )


def _words(unhealthy_runs: int, trouble: str, quarantined: bool) -> str:
    count = f"{unhealthy_runs} run{'s' if unhealthy_runs != 1 else ''} in a row"
    said = [f"{count} failed, timed out or were abandoned"]
    if quarantined:
        said.append("in quarantine: nothing runs it until it is released")
    if trouble:
        said.append(f"the last one: {trouble}")
    return "; ".join(said)
