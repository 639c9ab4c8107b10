"""Batches of kernel cases put together: how each operator does on each back end.

A batch never changes once it is written, so what is read here may be kept for long.
"""

import math
import sys
from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Text, and_, case, cast, func, or_, select
from sqlalchemy.orm import Session

from quantwatch.errors import NotFoundError
from quantwatch.store.kernels import KernelCase, case_of
from quantwatch.store.session import Database
from quantwatch.store.tables import KernelBatchRow, KernelCaseRow
from quantwatch.store.types import load_json

PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"
_NONE = "[]"
_SMALLEST, _LARGEST = sys.float_info.min, sys.float_info.max


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """The cases of one operator on one back end in one batch.

    `worst_share` is the largest error ÷ tolerance of the cases that were compared, infinite where
    an error is or where only 0 is allowed; None when none was.
    """

    operator: str
    backend: str
    num_passed: int
    num_failed: int
    num_not_applicable: int
    worst_share: float | None

    @property
    def num_cases(self) -> int:
        """All cases."""
        return self.num_passed + self.num_failed + self.num_not_applicable


@dataclass(frozen=True, slots=True)
class Remarks:
    """What the cases of a group said.

    `num_fallbacks` counts calls and rows that another back end did; `reasons` are the messages with
    their number of cases, most frequent first.
    """

    num_fallbacks: int = 0
    reasons: tuple[tuple[str, int], ...] = ()


def groups_of(db: Database, batch_id: str) -> tuple[KernelGroup, ...]:
    """Return a batch's groups in the order they ran. Raises UserError when there is no such one."""
    with db.reader() as session:
        _require(session, batch_id)
        key = (KernelCaseRow.operator, KernelCaseRow.backend)
        query = (
            select(*key, *map(_count, (PASSED, FAILED, NOT_APPLICABLE)), _share(), _infinite())
            .where(KernelCaseRow.batch_id == batch_id)
            .group_by(*key)
            .order_by(func.min(KernelCaseRow.idx))
        )
        return tuple(
            KernelGroup(
                operator=row[0],
                backend=row[1],
                num_passed=row[2],
                num_failed=row[3],
                num_not_applicable=row[4],
                worst_share=math.inf if row[6] else row[5],
            )
            for row in session.execute(query)
        )


def remarks_of(db: Database, batch_id: str) -> dict[tuple[str, str], Remarks]:
    """Return what the groups of a batch said, by operator and back end; silent ones are left out.

    Raises UserError when there is no such batch.
    """
    with db.reader() as session:
        _require(session, batch_id)
        fallbacks, reasons = _fallbacks(session, batch_id), _reasons(session, batch_id)
    return {
        key: Remarks(fallbacks.get(key, 0), reasons.get(key, ()))
        for key in dict.fromkeys([*fallbacks, *reasons])
    }


def cases_where(
    db: Database,
    batch_id: str,
    limit: int,
    *,
    operator: str | None = None,
    backend: str | None = None,
    status: str | None = None,
) -> tuple[KernelCase, ...]:
    """Return the first cases of a batch with these values; None is any.

    Raises UserError when there is no such batch.
    """
    row = KernelCaseRow
    query = select(row).where(row.batch_id == batch_id)
    for column, value in ((row.operator, operator), (row.backend, backend), (row.status, status)):
        if value is not None:
            query = query.where(column == value)
    with db.reader() as session:
        _require(session, batch_id)
        rows = session.scalars(query.order_by(KernelCaseRow.idx).limit(limit))
        return tuple(case_of(row) for row in rows)


def _require(session: Session, batch_id: str) -> None:
    if session.get(KernelBatchRow, batch_id) is None:
        raise NotFoundError(f"There is no batch of kernel cases with the id {batch_id!r}.")


def _count(status: str) -> ColumnElement[int]:
    return func.sum(case((KernelCaseRow.status == status, 1), else_=0))


def _compared() -> ColumnElement[bool]:
    """Where a back end does not apply, another one was compared in its place."""
    return and_(KernelCaseRow.status != NOT_APPLICABLE, KernelCaseRow.error_kind != "missing")


def _share() -> ColumnElement[float | None]:
    """Return the largest finite share; an exact result counts as 0, whatever is allowed.

    What no float can hold is left out first: for PostgreSQL that is an error of the whole query.
    """
    row = KernelCaseRow
    finite = and_(_compared(), row.error_kind == "finite")
    too_small = and_(row.tolerance > 1.0, row.error < row.tolerance * _SMALLEST)
    of_tolerance = case(
        (_too_large(), None),
        (or_(row.error == 0.0, too_small), 0.0),
        else_=row.error / func.nullif(row.tolerance, 0.0),
    )
    return func.max(case((finite, of_tolerance)))


def _too_large() -> ColumnElement[bool]:
    row = KernelCaseRow
    return and_(row.tolerance > 0.0, row.tolerance < 1.0, row.error > row.tolerance * _LARGEST)


def _infinite() -> ColumnElement[int]:
    """Return how many cases have a share that is no number."""
    row = KernelCaseRow
    none_allowed = and_(row.tolerance == 0.0, row.error > 0.0)
    beyond = and_(_compared(), or_(row.error_kind != "finite", none_allowed, _too_large()))
    return func.sum(case((beyond, 1), else_=0))


def _fallbacks(session: Session, batch_id: str) -> dict[tuple[str, str], int]:
    """Return how many calls and rows another back end did. Few texts differ: each is read once."""
    row, text = KernelCaseRow, cast(KernelCaseRow.fallbacks, Text)
    query = select(row.operator, row.backend, text, func.count()).where(
        row.batch_id == batch_id, text != _NONE
    )
    found: dict[tuple[str, str], int] = defaultdict(int)
    for operator, backend, listed, cases in session.execute(
        query.group_by(row.operator, row.backend, text)
    ):
        calls = load_json(listed) if isinstance(listed, str) else listed
        found[operator, backend] += cases * sum(int(count) for *_, count in calls)
    return found


def _reasons(session: Session, batch_id: str) -> dict[tuple[str, str], tuple[tuple[str, int], ...]]:
    row, number = KernelCaseRow, func.count()
    query = (
        select(row.operator, row.backend, row.message, number)
        .where(row.batch_id == batch_id, row.message != "")
        .group_by(row.operator, row.backend, row.message)
        .order_by(number.desc(), row.message)
    )
    found: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for operator, backend, message, cases in session.execute(query):
        found[operator, backend].append((message, cases))
    return {key: tuple(each) for key, each in found.items()}
