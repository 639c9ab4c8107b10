"""What each run of a check was made with, so that a trend can say what changed and when."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from quantwatch.domain import Fingerprint, Json, RunStatus, Verdict
from quantwatch.store.among import among
from quantwatch.store.session import Database
from quantwatch.store.tables import (
    CheckRow,
    EnvironmentRow,
    RunCandidateRow,
    RunRow,
    SuiteRow,
    VariantRow,
)

Digests = Mapping[str, str]
_RAN = [status.value for status in RunStatus if status.is_ended and status is not RunStatus.SKIPPED]
"""A skipped slot measured nothing and was made with nothing: three weeks of pause are no runs."""
_OWN = ("started_at", "finished_at", "trigger", "parent_run_id", "baseline_run_id", "num_alerts")


@dataclass(frozen=True, slots=True)
class CandidateMark:
    """One candidate of a run: what it was, and how large. None where it could not be loaded."""

    name: str
    verdict: Verdict | None
    digests: Digests | None
    execution: str | None
    bits_per_weight: float | None
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class RunMark:
    """One ended run on a time axis. Runs made with the same share the same records."""

    run_id: str
    status: RunStatus
    verdict: Verdict | None
    reason: str | None
    started_at: datetime
    finished_at: datetime | None
    trigger: str
    parent_run_id: str | None
    baseline_run_id: str | None
    num_alerts: int
    measured: Json
    """What was measured and how: suite_hash, capture_sha, metrics_version."""
    environment: Json
    reference: Digests | None
    candidates: tuple[CandidateMark, ...]


def run_marks(db: Database, check: str, limit: int = 400) -> tuple[RunMark, ...]:
    """Return the newest ended runs of a check, oldest first; skipped slots are none."""
    with db.reader() as session:
        runs = session.execute(_newest(check, limit)).mappings().all()[::-1]
        candidates = _candidates(session, [run["id"] for run in runs])
        variants = _variants(session, {run["reference_variant_id"] for run in runs} | {
            row["variant_id"] for rows in candidates.values() for row in rows
        })  # fmt: skip
        environments = _environments(session, {run["environment_id"] for run in runs})
    return tuple(_mark(run, environments, variants, candidates.get(run["id"], ())) for run in runs)


def candidate_notes(
    session: Session, run_ids: Collection[str]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return what loading the candidates of these runs noted, by check and candidate."""
    query = (
        select(CheckRow.name, RunCandidateRow.name, RunCandidateRow.variant_details)
        .join(RunRow, RunRow.id == RunCandidateRow.run_id)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .where(RunCandidateRow.run_id.in_(list(run_ids)))
    )
    return {
        (row[0], row[1]): tuple((row[2] or {}).get("notes") or ()) for row in session.execute(query)
    }


def _newest(check: str, limit: int) -> Select[*tuple[Any, ...]]:
    return (
        select(RunRow.id, RunRow.status, RunRow.verdict, RunRow.reason_text)
        .add_columns(*(getattr(RunRow, name) for name in _OWN))
        .add_columns(RunRow.environment_id, RunRow.reference_variant_id)
        .add_columns(SuiteRow.hash.label("suite_hash"), RunRow.capture_sha, RunRow.metrics_version)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .outerjoin(SuiteRow, SuiteRow.id == RunRow.suite_id)
        .where(CheckRow.name == check, RunRow.status.in_(_RAN))
        .order_by(RunRow.started_at.desc(), RunRow.id.desc())
        .limit(limit)
    )


def _candidates(session: Session, run_ids: Collection[str]) -> dict[str, list[Any]]:
    row = RunCandidateRow
    query = (
        select(row.run_id, row.name, row.verdict, row.variant_id)
        .add_columns(row.execution, row.bits_per_weight, row.size_bytes)
        .where(among(session, row.run_id, run_ids))
        .order_by(row.run_id, row.idx)
    )
    found: dict[str, list[Any]] = defaultdict(list)
    for each in session.execute(query).mappings():
        found[each["run_id"]].append(each)
    return found


def _variants(session: Session, ids: Collection[int | None]) -> dict[int | None, Digests]:
    names = Fingerprint.__slots__
    query = select(VariantRow.id, *(getattr(VariantRow, name) for name in names))
    rows = session.execute(query.where(among(session, VariantRow.id, _known(ids)))).mappings()
    return {row["id"]: {name: row[name] for name in names} for row in rows}


def _environments(session: Session, ids: Collection[int | None]) -> dict[int | None, Json]:
    query = select(EnvironmentRow.id, EnvironmentRow.details)
    rows = session.execute(query.where(among(session, EnvironmentRow.id, _known(ids))))
    return {row.id: row.details for row in rows}


def _known(ids: Collection[int | None]) -> list[int]:
    return sorted(each for each in ids if each is not None)


def _mark(
    run: Any,
    environments: Mapping[int | None, Json],
    variants: Mapping[int | None, Digests],
    candidates: Collection[Any],
) -> RunMark:
    return RunMark(
        run_id=run["id"],
        status=RunStatus(run["status"]),
        verdict=_verdict(run["verdict"]),
        reason=run["reason_text"],
        **{name: run[name] for name in _OWN},
        measured={name: run[name] for name in ("suite_hash", "capture_sha", "metrics_version")},
        environment=environments.get(run["environment_id"], {}),
        reference=variants.get(run["reference_variant_id"]),
        candidates=tuple(_candidate(row, variants) for row in candidates),
    )


def _candidate(row: Any, variants: Mapping[int | None, Digests]) -> CandidateMark:
    return CandidateMark(
        name=row["name"],
        verdict=_verdict(row["verdict"]),
        digests=variants.get(row["variant_id"]),
        execution=row["execution"],
        bits_per_weight=row["bits_per_weight"],
        size_bytes=row["size_bytes"],
    )


def _verdict(text: str | None) -> Verdict | None:
    return None if text is None else Verdict(text)
