"""Which run a check's runs are compared with: pinned by somebody, or found among earlier ones."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, and_, func, or_, select, tuple_
from sqlalchemy.orm import Session

from quantwatch.domain import MODEL, UNDECIDED, RunResult, RunStatus, Verdict
from quantwatch.errors import NotFoundError, UserError
from quantwatch.store import audit
from quantwatch.store.session import Database
from quantwatch.store.tables import (
    AlertRow,
    AlertScopeRow,
    AuditRow,
    BaselinePinRow,
    CheckRow,
    LatestRunRow,
    MeasurementRow,
    MetricRow,
    RunCandidateRow,
    RunRow,
    ScopeRow,
    SuiteRow,
    VariantRow,
)

PIN, UNPIN = "baseline.pin", "baseline.unpin"
"""Actions in the audit log; the subject is `check` and its name."""
_OUTPUT_KL = ("logit_kl", "served_kl")
"""A candidate has one of them: the second if it is served, a lower bound then."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The run that is pinned, since when, and by whom (None: pinned before that was kept)."""

    run_id: str
    since: datetime
    by: str | None


def pin(db: Database, check: str, run_id: str, *, actor: str = "unknown") -> None:
    """Make a succeeded run of the check its baseline, in place of the one before.

    Raises UserError when there is no such run, it did not succeed, or it is another check's.
    """
    with db.writer() as session:
        check_id = _pinnable(session, db, check, run_id)
        before = session.get(BaselinePinRow, check_id)
        known = None if before is None else {"run": before.run_id}
        session.merge(BaselinePinRow(check_id=check_id, run_id=run_id, pinned_at=datetime.now(UTC)))
        audit.note(session, actor, PIN, _subject(check), known, {"run": run_id})


def unpin(db: Database, check: str, *, actor: str = "unknown") -> None:
    """Leave a check without a pinned baseline. Raises UserError when it has none."""
    with db.writer() as session:
        row = session.scalar(
            select(BaselinePinRow)
            .join(CheckRow, CheckRow.id == BaselinePinRow.check_id)
            .where(CheckRow.name == check)
        )
        if row is None:
            raise UserError(f"Check {check} has no pinned baseline.")
        session.delete(row)
        audit.note(session, actor, UNPIN, _subject(check), {"run": row.run_id}, None)


def get_pinned(db: Database, check: str) -> str | None:
    """Return the id of the run that is pinned, None when there is none."""
    found = get_pin(db, check)
    return None if found is None else found.run_id


def get_pin(db: Database, check: str) -> Pin | None:
    """Return what is pinned, since when and by whom; None when nothing is."""
    query = (
        select(BaselinePinRow)
        .join(CheckRow, CheckRow.id == BaselinePinRow.check_id)
        .where(CheckRow.name == check)
    )
    told = (
        select(AuditRow.actor, AuditRow.after)
        .where(AuditRow.subject == _subject(check), AuditRow.action == PIN)
        .order_by(AuditRow.id.desc())
        .limit(1)
    )
    with db.reader() as session:
        row = session.scalar(query)
        if row is None:
            return None
        last = session.execute(told).first()
        by = last.actor if last is not None and last.after == {"run": row.run_id} else None
        return Pin(row.run_id, row.pinned_at, by)


@dataclass(frozen=True, slots=True)
class Standing:
    """What a check is compared with: as configured in its newest run, and as it stands."""

    check: str
    kind: str
    run_id: str | None
    """The pinned run; of another kind the one that the newest succeeded run was compared with."""
    since: datetime | None
    by: str | None


def standings(db: Database) -> list[Standing]:
    """Return what each check with an ended run is compared with, by name."""
    query = (
        select(CheckRow.name, RunRow.config, RunRow.baseline_run_id)
        .join(LatestRunRow, LatestRunRow.check_id == CheckRow.id)
        .join(
            RunRow, RunRow.id == func.coalesce(LatestRunRow.succeeded_run_id, LatestRunRow.run_id)
        )
        .order_by(CheckRow.name)
    )
    with db.reader() as session:
        rows = session.execute(query).all()
    return [_standing(db, *row) for row in rows]


def _standing(db: Database, check: str, config: Any, compared: str | None) -> Standing:
    kind = str(config.get("baseline", {}).get("kind", "pinned"))
    if kind != "pinned":
        return Standing(check, kind, compared, None, None)
    pinned = get_pin(db, check)
    if pinned is None:
        return Standing(check, kind, None, None, None)
    return Standing(check, kind, pinned.run_id, pinned.since, pinned.by)


def recent_good(
    db: Database, like: RunResult, limit: int, *, apart_from: Collection[tuple[str, str]] = ()
) -> list[str]:
    """Return the newest comparable runs that were no worse, newest first, at most `limit`.

    A run was worse if it was a regression, or breached any rule whatever its severity. `apart_from`
    are (candidate, rule) that compare with no baseline. What became worse never becomes normal.
    """
    breached = (
        select(AlertScopeRow.run_id)
        .join(AlertRow, AlertRow.id == AlertScopeRow.alert_id)
        .where(
            AlertScopeRow.value_kind.not_in(UNDECIDED),
            tuple_(AlertRow.candidate, AlertRow.rule).not_in(list(apart_from)),
        )
    )
    query = (
        _comparable(like)
        .where(RunRow.verdict != Verdict.REGRESSION.value, RunRow.id.not_in(breached))
        .order_by(RunRow.started_at.desc(), RunRow.id.desc())
        .limit(limit)
    )
    with db.reader() as session:
        return list(session.scalars(query))


def best_run(db: Database, like: RunResult, candidates: list[str]) -> tuple[str | None, int]:
    """Return the comparable run with the lowest output KL, a mean over the candidates, and of how
    many it is the lowest: the more there are, the more of it is luck.

    Only runs that measured all of them, with finite values alone; the oldest of equal ones.
    """
    bad = MeasurementRow.n_nan + MeasurementRow.n_posinf + MeasurementRow.n_neginf
    query = (
        _comparable(like)
        .join(RunCandidateRow, RunCandidateRow.run_id == RunRow.id)
        .join(MeasurementRow, MeasurementRow.run_candidate_id == RunCandidateRow.id)
        .join(MetricRow, MetricRow.id == MeasurementRow.metric_id)
        .join(ScopeRow, ScopeRow.id == MeasurementRow.scope_id)
        .where(MetricRow.slug.in_(_OUTPUT_KL), ScopeRow.name == MODEL)
        .where(RunCandidateRow.name.in_(candidates), MeasurementRow.mean.is_not(None), bad == 0)
        .group_by(RunRow.id, RunRow.started_at)
        .having(func.count() == len(candidates))
        .order_by(func.avg(MeasurementRow.mean), RunRow.started_at, RunRow.id)
    )
    with db.reader() as session:
        found = list(session.scalars(query))
        return (found[0] if found else None), len(found)


def confirmed_run(db: Database, run_id: str) -> str | None:
    """Return the run that a confirmation run confirms; None for any other run."""
    query = select(RunRow.parent_run_id).where(RunRow.id == run_id, RunRow.trigger == "confirm")
    with db.reader() as session:
        return session.scalar(query)


def _comparable(like: RunResult) -> Select[Any]:
    """Select the earlier succeeded runs of a run's check that measured the same in the same way.

    Not what a confirmation run confirms, nor what confirms the same: they are the same night.
    """
    night = (
        select(RunRow.parent_run_id)
        .where(RunRow.id == like.run_id, RunRow.trigger == "confirm")
        .scalar_subquery()
    )
    reference = "" if like.reference is None else like.reference.fingerprint.digest
    return (
        select(RunRow.id)
        .join(CheckRow, and_(CheckRow.id == RunRow.check_id, CheckRow.name == like.check))
        .join(SuiteRow, and_(SuiteRow.id == RunRow.suite_id, SuiteRow.hash == like.suite_hash))
        .join(VariantRow, VariantRow.id == RunRow.reference_variant_id)
        .where(
            VariantRow.fingerprint == reference,
            RunRow.capture_sha == like.capture_sha,
            RunRow.metrics_version == like.metrics_version,
            RunRow.status == RunStatus.SUCCEEDED.value,
            RunRow.id != like.run_id,
            RunRow.id.is_distinct_from(night),
            or_(RunRow.parent_run_id.is_(None), RunRow.parent_run_id.is_distinct_from(night)),
            RunRow.started_at <= like.started_at,
        )
    )


def _pinnable(session: Session, db: Database, check: str, run_id: str) -> int:
    found: Any = session.execute(
        select(RunRow.check_id, RunRow.status, CheckRow.name)
        .join(CheckRow, CheckRow.id == RunRow.check_id)
        .where(RunRow.id == run_id)
    ).first()
    if found is None:
        raise NotFoundError(f"There is no run {run_id} in database {db.name}.")
    check_id, status, name = found
    if name != check:
        raise UserError(f"Run {run_id} is of check {name}; it can't be the baseline of {check}.")
    if status != RunStatus.SUCCEEDED.value:
        raise UserError(f"Run {run_id} is {status}; only a succeeded run can be a baseline.")
    return int(check_id)


def _subject(check: str) -> str:
    return f"check {check}"
