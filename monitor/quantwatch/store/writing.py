"""A run's result as rows. Everything here happens inside one transaction of the caller."""

from dataclasses import asdict
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from quantwatch.domain import Alert, CandidateResult, Measurement, RunResult, Variant
from quantwatch.store import lookups
from quantwatch.store.detectables import insert_detectables
from quantwatch.store.kinds import FINITE, MISSING, finite_or_none, kind_of
from quantwatch.store.statistics import COUNTS, STATISTICS
from quantwatch.store.tables import (
    AlertRow,
    AlertScopeRow,
    MeasurementRow,
    NoiseFloorRow,
    RunCandidateRow,
)


def run_values(session: Session, result: RunResult, suite_id: int | None) -> dict[str, Any]:
    """Return the columns of the run's row; writes the rows they refer to."""
    reference = result.reference
    variants = lookups.variant_ids(session, [] if reference is None else [reference])
    return {
        "status": result.status.value,
        "verdict": result.verdict and result.verdict.value,
        "reason_text": result.reason,
        "started_at": result.started_at,
        "finished_at": result.finished_at,
        "suite_id": suite_id,
        "suite_name": result.suite_name,
        "num_tokens": result.num_tokens,
        "num_prompts": result.num_prompts,
        "reference_variant_id": reference and variants[reference.fingerprint.digest],
        "reference_details": reference and _details(reference),
        "capture_sha": result.capture_sha,
        "metrics_version": result.metrics_version,
        "environment_id": lookups.environment_id(session, result.environment),
        "config": result.config,
        "capture": result.capture,
        "timings_s": result.timings_s,
        "baseline_run_id": result.baseline_run_id,
        "baseline_mismatch": result.baseline_mismatch,
        "num_alerts": len(result.alerts),
    }


def insert_candidates(session: Session, result: RunResult) -> dict[str, int]:
    """Write the candidates and what was found of them; return the candidates' ids by name."""
    variants = lookups.variant_ids(session, (c.variant for c in result.candidates if c.variant))
    ids: dict[str, int] = {}
    for idx, candidate in enumerate(result.candidates):
        row = RunCandidateRow(run_id=result.run_id, idx=idx, **_candidate(candidate, variants))
        session.add(row)
        session.flush()
        ids[candidate.name] = row.id
    _insert_measurements(session, result, ids)
    insert_detectables(session, result, ids)
    return ids


def insert_noise_floor(session: Session, result: RunResult) -> None:
    """Write the noise floor."""
    metrics = lookups.metric_ids(session, {metric for metric, _ in result.noise_floor})
    scopes = lookups.scope_ids(session, {scope for _, scope in result.noise_floor})
    rows = [
        {
            "run_id": result.run_id,
            "metric_id": metrics[metric],
            "scope_id": scopes[scope],
            "value": finite_or_none(value),
            "kind": kind_of(value),
        }
        for (metric, scope), value in result.noise_floor.items()
    ]
    if rows:
        session.execute(insert(NoiseFloorRow), rows)


def insert_alerts(session: Session, result: RunResult, check_id: int) -> None:
    """Write what was breached. Raises ValueError when a value and its kind disagree."""
    if not result.alerts:
        return
    metrics = lookups.metric_ids(session, {alert.metric for alert in result.alerts})
    scopes = lookups.scope_ids(session, {alert.scope for alert in result.alerts})
    alerts = _alert_ids(session, result.alerts, check_id)
    rows = [
        {
            "run_id": result.run_id,
            "idx": idx,
            "alert_id": alerts[alert.candidate, alert.rule],
            "metric_id": metrics[alert.metric],
            "scope_id": scopes[alert.scope],
            "statistic": alert.statistic,
            "value": _alert_value(alert),
            "value_kind": alert.value_kind,
            "threshold": alert.threshold,
            "severity": alert.severity.value,
            "words": alert.words,
        }
        for idx, alert in enumerate(result.alerts)
    ]
    session.execute(insert(AlertScopeRow), rows)


def _alert_value(alert: Alert) -> float | None:
    if (alert.value_kind == FINITE) != (kind_of(alert.value) == FINITE):
        raise ValueError(
            f"alert {alert.rule} at {alert.scope}: value {alert.value} is not {alert.value_kind}"
        )
    return finite_or_none(alert.value)


def _alert_ids(
    session: Session, alerts: tuple[Alert, ...], check_id: int
) -> dict[tuple[str, str], int]:
    pairs = sorted({(alert.candidate, alert.rule) for alert in alerts})
    rows = [{"check_id": check_id, "candidate": name, "rule": rule} for name, rule in pairs]
    session.execute(lookups.insert_new(session, AlertRow), rows)
    found = session.execute(
        select(AlertRow.candidate, AlertRow.rule, AlertRow.id).where(AlertRow.check_id == check_id)
    )
    return {(name, rule): number for name, rule, number in found}


def _insert_measurements(session: Session, result: RunResult, ids: dict[str, int]) -> None:
    measured = [(c.name, m) for c in result.candidates for m in c.measurements]
    metrics = lookups.metric_ids(session, {row.metric for _, row in measured})
    scopes = lookups.scope_ids(session, {row.scope for _, row in measured})
    rows = [
        {
            "run_candidate_id": ids[candidate.name],
            "metric_id": metrics[row.metric],
            "scope_id": scopes[row.scope],
            "idx": idx,
            **_measurement(row),
        }
        for candidate in result.candidates
        for idx, row in enumerate(candidate.measurements)
    ]
    if rows:
        session.execute(insert(MeasurementRow), rows)


def _measurement(row: Measurement) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in STATISTICS}
    kinds = {name: kind_of(value) for name, value in values.items()}
    special = {name: kind for name, kind in kinds.items() if kind not in (FINITE, MISSING)}
    return {
        **{name: getattr(row, name) for name in COUNTS},
        **{name: finite_or_none(value) for name, value in values.items()},
        "kinds": special or None,
        "max_prompt": row.max_prompt,
        "max_position": row.max_position,
        "method": row.method,
    }


def _candidate(candidate: CandidateResult, variants: dict[str, int]) -> dict[str, Any]:
    variant = candidate.variant
    first = candidate.first_nonfinite
    return {
        "name": candidate.name,
        "verdict": candidate.verdict and candidate.verdict.value,
        "variant_id": variant and variants[variant.fingerprint.digest],
        "execution": variant and variant.execution,
        "size_bytes": variant and variant.size_bytes,
        "bits_per_weight": variant and variant.bits_per_weight,
        "variant_details": variant and _details(variant),
        "culprit": candidate.culprit and asdict(candidate.culprit),
        "first_nonfinite": first and asdict(first),
        "bit_equal": bool(candidate.bit_equal),
        "failure": candidate.failure,
        "baseline_differences": candidate.baseline_differences,
    }


def _details(variant: Variant) -> dict[str, Any]:
    """Return everything about a variant but its fingerprint."""
    return {
        "name": variant.name,
        "execution": variant.execution,
        "size_bytes": variant.size_bytes,
        "bits_per_weight": variant.bits_per_weight,
        "source": variant.source,
        "notes": variant.notes,
        "skipped": variant.skipped,
    }
