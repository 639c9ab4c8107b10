"""Rows as a run's result, field by field what `writing` was given."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from quantwatch.domain import (
    Alert,
    CandidateResult,
    Culprit,
    Fingerprint,
    Measurement,
    NonFinite,
    RunResult,
    RunStatus,
    Scope,
    Severity,
    Variant,
    Verdict,
    reason_words,
)
from quantwatch.store.detectables import read_detectables
from quantwatch.store.kinds import FINITE, from_kind
from quantwatch.store.statistics import COUNTS, STATISTICS
from quantwatch.store.tables import (
    AlertRow,
    AlertScopeRow,
    CheckRow,
    EnvironmentRow,
    MeasurementRow,
    MetricRow,
    NoiseFloorRow,
    RunCandidateRow,
    RunRow,
    ScopeRow,
    SuiteRow,
    VariantRow,
)

_COLUMNS = (*COUNTS, *STATISTICS, "max_prompt", "max_position", "method")


def read_result(session: Session, run_id: str) -> RunResult | None:
    """Return a run's result, None when there is no such run. Only the header before it ended."""
    return read_results(session, [run_id]).get(run_id)


def read_results(
    session: Session, run_ids: Sequence[str], *, metric: str | None = None
) -> dict[str, RunResult]:
    """Return several runs' results by id; those that are not there are left out.

    With `metric`, of measurements and floors only that metric's are read, and no minimum effects.
    """
    rows = session.execute(_header(run_ids)).all()
    candidates = _candidates(session, run_ids, metric)
    alerts, floors = read_alerts(session, run_ids), _noise_floor(session, run_ids, metric)
    return {
        row[0].id: _result(
            row,
            tuple(candidates.get(row[0].id, ())),
            tuple(alerts.get(row[0].id, ())),
            floors.get(row[0].id, {}),
        )
        for row in rows
    }


def _result(
    found: Any,
    candidates: tuple[CandidateResult, ...],
    alerts: tuple[Alert, ...],
    noise_floor: dict[tuple[str, str], float],
) -> RunResult:
    run, check, suite_hash, environment, reference = found
    return RunResult(
        run_id=run.id,
        check=check,
        status=RunStatus(run.status),
        verdict=_verdict(run.verdict),
        started_at=run.started_at,
        finished_at=run.finished_at,
        suite_name=run.suite_name,
        suite_hash=suite_hash or "",
        num_tokens=run.num_tokens,
        num_prompts=run.num_prompts,
        reference=_variant(run.reference_details, reference),
        capture_sha=run.capture_sha,
        metrics_version=run.metrics_version,
        environment=environment or {},
        config=run.config,
        candidates=candidates,
        alerts=alerts,
        noise_floor=noise_floor,
        timings_s=run.timings_s,
        baseline_run_id=run.baseline_run_id,
        baseline_mismatch=tuple(run.baseline_mismatch),
        capture=run.capture,
        reason=reason_words(run.reason_code) if run.reason_text is None else run.reason_text,
    )


def _header(run_ids: Sequence[str]) -> Select[*tuple[Any, ...]]:
    return (
        select(RunRow, CheckRow.name, SuiteRow.hash, EnvironmentRow.details, VariantRow)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .outerjoin(SuiteRow, SuiteRow.id == RunRow.suite_id)
        .outerjoin(EnvironmentRow, EnvironmentRow.id == RunRow.environment_id)
        .outerjoin(VariantRow, VariantRow.id == RunRow.reference_variant_id)
        .where(RunRow.id.in_(list(run_ids)))
    )


def _candidates(
    session: Session, run_ids: Sequence[str], metric: str | None
) -> dict[str, list[CandidateResult]]:
    rows = session.execute(
        select(RunCandidateRow, VariantRow)
        .outerjoin(VariantRow, VariantRow.id == RunCandidateRow.variant_id)
        .where(RunCandidateRow.run_id.in_(list(run_ids)))
        .order_by(RunCandidateRow.run_id, RunCandidateRow.idx)
    ).all()
    ids = [row.id for row, _ in rows]
    measured = _measurements(session, ids, metric)
    could = read_detectables(session, ids) if metric is None else {}
    found: dict[str, list[CandidateResult]] = {}
    for row, variant in rows:
        plain = _candidate(row, variant, tuple(measured.get(row.id, ())))
        found.setdefault(row.run_id, []).append(replace(plain, detectable=could.get(row.id, ())))
    return found


def _candidate(
    row: RunCandidateRow, variant: VariantRow | None, measured: tuple[Measurement, ...]
) -> CandidateResult:
    return CandidateResult(
        name=row.name,
        variant=_variant(row.variant_details, variant),
        verdict=_verdict(row.verdict),
        measurements=measured,
        culprit=_culprit(row.culprit),
        first_nonfinite=row.first_nonfinite and NonFinite(**row.first_nonfinite),
        bit_equal=row.bit_equal,
        failure=row.failure,
        baseline_differences=tuple(row.baseline_differences),
    )


def _measurements(
    session: Session, ids: Sequence[int], metric: str | None
) -> dict[int, list[Measurement]]:
    # Columns instead of entities: thousands of rows a run, and a page waits for them.
    columns = [getattr(MeasurementRow, name) for name in _COLUMNS]
    query = (
        select(MeasurementRow.run_candidate_id, MeasurementRow.kinds, *columns)
        .add_columns(MetricRow.slug, ScopeRow.name)
        .join(MetricRow, MetricRow.id == MeasurementRow.metric_id)
        .join(ScopeRow, ScopeRow.id == MeasurementRow.scope_id)
        .where(MeasurementRow.run_candidate_id.in_(ids))
        .order_by(MeasurementRow.run_candidate_id, MeasurementRow.idx)
    )
    if metric is not None:
        query = query.where(MetricRow.slug == metric)
    found: dict[int, list[Measurement]] = {}
    for candidate_id, kinds, *values, slug, scope in session.execute(query):
        fields = dict(zip(_COLUMNS, values, strict=True))
        if kinds is not None:
            fields |= {name: from_kind(None, kind) for name, kind in kinds.items()}
        row = Measurement(metric=slug, scope=Scope(scope), **fields)
        found.setdefault(candidate_id, []).append(row)
    return found


def read_alerts(session: Session, run_ids: Sequence[str]) -> dict[str, list[Alert]]:
    """Return what several runs breached, by id, without anything that they measured."""
    rows = session.execute(
        select(AlertScopeRow, AlertRow, MetricRow.slug, ScopeRow.name)
        .join(AlertRow, AlertRow.id == AlertScopeRow.alert_id)
        .join(MetricRow, MetricRow.id == AlertScopeRow.metric_id)
        .join(ScopeRow, ScopeRow.id == AlertScopeRow.scope_id)
        .where(AlertScopeRow.run_id.in_(list(run_ids)))
        .order_by(AlertScopeRow.run_id, AlertScopeRow.idx)
    )
    found: dict[str, list[Alert]] = {}
    for row, alert, metric, scope in rows:
        found.setdefault(row.run_id, []).append(_alert(row, alert, metric, scope))
    return found


def _alert(row: AlertScopeRow, alert: AlertRow, metric: str, scope: str) -> Alert:
    return Alert(
        rule=alert.rule,
        candidate=alert.candidate,
        metric=metric,
        statistic=row.statistic,
        scope=Scope(scope),
        value=row.value if row.value_kind == FINITE else None,
        value_kind=row.value_kind,
        threshold=row.threshold,
        severity=Severity(row.severity),
        words=row.words,
    )


def _noise_floor(
    session: Session, run_ids: Sequence[str], metric: str | None
) -> dict[str, dict[tuple[str, str], float]]:
    row = NoiseFloorRow
    query = (
        select(row.run_id, MetricRow.slug, ScopeRow.name, row.value, row.kind)
        .join(MetricRow, MetricRow.id == row.metric_id)
        .join(ScopeRow, ScopeRow.id == row.scope_id)
        .where(row.run_id.in_(list(run_ids)))
    )
    if metric is not None:
        query = query.where(MetricRow.slug == metric)
    found: dict[str, dict[tuple[str, str], float]] = {}
    for run_id, slug, scope, value, kind in session.execute(query):
        number = from_kind(value, kind)
        if number is not None:
            found.setdefault(run_id, {})[slug, scope] = number
    return found


def _variant(details: Any, row: VariantRow | None) -> Variant | None:
    if details is None or row is None:
        return None
    fingerprint = Fingerprint(**{name: getattr(row, name) for name in Fingerprint.__slots__})
    return Variant(
        name=details["name"],
        fingerprint=fingerprint,
        execution=details["execution"],
        size_bytes=details["size_bytes"],
        bits_per_weight=details["bits_per_weight"],
        source=details["source"],
        notes=tuple(details["notes"]),
        skipped=tuple((scope, reason) for scope, reason in details["skipped"]),
    )


def _culprit(record: Any) -> Culprit | None:
    known = record and {**record, "head_rows": tuple(record["head_rows"])}
    return None if known is None else Culprit(**known)


def _verdict(text: str | None) -> Verdict | None:
    return None if text is None else Verdict(text)
