"""The rule that nobody can switch off: NaN and infinite values in what a candidate computes."""

from collections.abc import Iterator

from quantwatch.alerts.readings import num_bad
from quantwatch.alerts.words import title
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import MODEL, Alert, CandidateResult, Measurement, Scope
from quantwatch.metrics.registry import METRICS


def nonfinite_alert(candidate: CandidateResult, rule: RuleConfig) -> Iterator[Alert]:
    """Yield one alert at the first non-finite value, if there is any.

    The value is the number of non-finite output KLs, or, when the outputs are finite, of the first
    tap that has some. Target-token metrics are left out: the KL shows what they show.
    """
    rows = [row for row in candidate.measurements if _is_output_or_tap(row) and num_bad(row)]
    first = candidate.first_nonfinite
    if not rows and first is None:
        return
    worst = next((row for row in rows if row.scope == MODEL), rows[0] if rows else None)
    yield Alert(
        rule=rule.name,
        candidate=candidate.name,
        metric=rule.metric,
        statistic="count",
        scope=first.scope if first is not None else _first_scope(rows),
        value=float(num_bad(worst)) if worst is not None else 1.0,
        value_kind="finite",
        threshold=0.0,
        severity=rule.severity,
        words="; ".join([*_place(candidate), *_count(worst)]),
    )


def _is_output_or_tap(row: Measurement) -> bool:
    return row.metric in ("logit_kl", "served_kl") or METRICS[row.metric].where != "model"


def _first_scope(rows: list[Measurement]) -> Scope:
    """Measurements of one metric are in forward order; taps tell more than the output."""
    return next((row.scope for row in rows if row.scope != MODEL), MODEL)


def _place(candidate: CandidateResult) -> Iterator[str]:
    found = candidate.first_nonfinite
    if found is None:
        yield "non-finite values"
    else:
        yield (
            f"first non-finite value at {found.scope}, prompt {found.prompt}, "
            f"position {found.position}"
        )


def _count(row: Measurement | None) -> Iterator[str]:
    if row is not None:
        yield f"{title(row.metric)} at {row.scope}: {num_bad(row)} of {row.n} values not finite"
