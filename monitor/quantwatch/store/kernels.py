"""Kernel cases and speeds: one batch per call of the command, the newest ones kept."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from quantwatch.domain import Json
from quantwatch.errors import StoreError
from quantwatch.store import lookups
from quantwatch.store.kinds import finite_or_none, from_kind, kind_of
from quantwatch.store.session import Database
from quantwatch.store.tables import Base, KernelBatchRow, KernelCaseRow, KernelSpeedRow

KEPT = 30
"""Batches of each kind that stay: the newest. A case takes 0.2 kB, the whole grid 3 MB."""

Kind = Literal["test", "bench"]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One operator against its float64 twin. `error` is None where nothing could be compared."""

    operator: str
    backend: str
    variant: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    status: str
    error: float | None
    tolerance: float
    message: str
    fallbacks: tuple[tuple[str, str, int], ...]

    @property
    def name(self) -> str:
        """What `kernels test --case` calls it, within its operator."""
        return case_name(self.variant, self.backend, self.shape, self.dtype, self.layout)


def case_name(variant: str, backend: str, shape: Sequence[int], dtype: str, layout: str) -> str:
    """Return what a case is called within its operator: ``int4-g64/aten/16x64x576/bfloat16/…``."""
    return "/".join((variant, backend, "x".join(map(str, shape)), dtype, layout))


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """An operator's speed as a multiple of bfloat16 F.linear's, with its 95 % interval."""

    operator: str
    backend: str
    variant: str
    shape: tuple[int, ...]
    dtype: str
    ratio: float
    ratio_low: float
    ratio_high: float
    seconds: float
    baseline_seconds: float
    rounds: int
    threads: int
    message: str


@dataclass(frozen=True, slots=True)
class KernelBatch:
    """One call of the command. The three counts are those of the cases; 0 for a bench."""

    id: str
    kind: Kind
    device: str
    git_sha: str | None
    environment: Json
    started_at: datetime
    finished_at: datetime
    num_passed: int = 0
    num_failed: int = 0
    num_not_applicable: int = 0


def insert_cases(db: Database, batch: KernelBatch, cases: Sequence[KernelCase]) -> None:
    """Write a batch of cases in one transaction."""
    _insert(db, batch, KernelCaseRow, map(_case_values, cases))


def insert_speeds(db: Database, batch: KernelBatch, speeds: Sequence[KernelSpeed]) -> None:
    """Write a batch of speeds in one transaction."""
    _insert(db, batch, KernelSpeedRow, map(asdict, speeds))


def list_batches(db: Database, kind: Kind, *, limit: int = 20) -> list[KernelBatch]:
    """Return the newest batches of a kind, the newest first."""
    with db.reader() as session:
        rows = session.scalars(_newest(kind).limit(limit)).all()
        return [_batch(session, row) for row in rows]


def cases_of(db: Database, batch_id: str) -> list[KernelCase]:
    """Return a batch's cases in the order they ran. Raises StoreError when there is no such one."""
    with db.reader() as session:
        _require(session, batch_id)
        query = select(KernelCaseRow).where(KernelCaseRow.batch_id == batch_id)
        return [case_of(row) for row in session.scalars(query.order_by(KernelCaseRow.idx))]


def speeds_of(db: Database, batch_id: str) -> list[KernelSpeed]:
    """Return a batch's speeds in the order they ran. Raises StoreError when there is none."""
    with db.reader() as session:
        _require(session, batch_id)
        query = select(KernelSpeedRow).where(KernelSpeedRow.batch_id == batch_id)
        rows = session.scalars(query.order_by(KernelSpeedRow.idx))
        return [
            KernelSpeed(
                **{name: getattr(row, name) for name in KernelSpeed.__slots__ if name != "shape"},
                shape=tuple(row.shape),
            )
            for row in rows
        ]


def _insert(
    db: Database, batch: KernelBatch, table: type[Base], rows: Iterable[dict[str, Any]]
) -> None:
    values = [{"batch_id": batch.id, "idx": idx, **row} for idx, row in enumerate(rows)]
    columns = asdict(batch)
    environment = columns.pop("environment")
    with db.writer() as session:
        columns["environment_id"] = lookups.environment_id(session, environment)
        session.execute(insert(KernelBatchRow), [columns])
        if values:
            session.execute(insert(table), values)
        _prune(session, batch.kind)


def _prune(session: Session, kind: Kind) -> None:
    """Drop the batches beyond the newest `KEPT`, rows and all."""
    old = session.scalars(_newest(kind).with_only_columns(KernelBatchRow.id).offset(KEPT)).all()
    for batch_id in old:
        session.execute(delete(KernelBatchRow).where(KernelBatchRow.id == batch_id))


def _newest(kind: Kind) -> Any:
    return (
        select(KernelBatchRow)
        .where(KernelBatchRow.kind == kind)
        .order_by(KernelBatchRow.started_at.desc(), KernelBatchRow.id.desc())
    )


def _require(session: Session, batch_id: str) -> None:
    if session.get(KernelBatchRow, batch_id) is None:
        raise StoreError(f"no batch of kernel cases has the id {batch_id!r}")


def _case_values(case: KernelCase) -> dict[str, Any]:
    values = asdict(case)
    values["error_kind"] = kind_of(case.error)
    values["error"] = finite_or_none(case.error)
    return values


def case_of(row: KernelCaseRow) -> KernelCase:
    """Return a case as it was stored."""
    plain = {"operator", "backend", "variant", "dtype", "layout", "status", "tolerance", "message"}
    return KernelCase(
        **{name: getattr(row, name) for name in plain},
        shape=tuple(row.shape),
        error=from_kind(row.error, row.error_kind),
        fallbacks=tuple((used, why, count) for used, why, count in row.fallbacks),
    )


def _batch(session: Session, row: KernelBatchRow) -> KernelBatch:
    from quantwatch.store.tables import EnvironmentRow

    environment = session.get_one(EnvironmentRow, row.environment_id)
    names = set(KernelBatch.__slots__) - {"environment"}
    return KernelBatch(
        **{name: getattr(row, name) for name in names}, environment=environment.details
    )
