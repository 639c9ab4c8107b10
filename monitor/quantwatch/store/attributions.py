"""Attributions: written beside the candidate they are about, the newest in place of the last."""

from dataclasses import asdict
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from quantwatch.domain import AttributedPart, Attribution, Restoration, Scope, Verdict
from quantwatch.errors import NotFoundError
from quantwatch.store.session import Database
from quantwatch.store.tables import AttributionPartRow, AttributionRow, RunCandidateRow

_NOT_COLUMNS = {"candidate", "parts", "restoration"}


def save_attribution(db: Database, run_id: str, found: Attribution) -> None:
    """Write an attribution in place of the candidate's last one, all of it or nothing.

    Raises NotFoundError when the run or its candidate isn't stored (any more).
    """
    with db.writer() as session:
        key = _candidate_id(session, run_id, found.candidate)
        if key is None:
            raise NotFoundError(f"There is no candidate {found.candidate!r} of run {run_id}.")
        session.execute(delete(AttributionRow).where(AttributionRow.run_candidate_id == key))
        restored = found.restoration
        values = {n: getattr(found, n) for n in Attribution.__slots__ if n not in _NOT_COLUMNS}
        values["restoration"] = None if restored is None else asdict(restored)
        session.execute(insert(AttributionRow), [{"run_candidate_id": key, **values}])
        rows = [
            {"run_candidate_id": key, "idx": idx, **asdict(part)}
            for idx, part in enumerate(found.parts)
        ]
        if rows:
            session.execute(insert(AttributionPartRow), rows)


def attributions_of(db: Database, run_id: str) -> list[Attribution]:
    """Return what was attributed of a run, in the order of its candidates; empty when nothing."""
    query = (
        select(AttributionRow, RunCandidateRow.name)
        .join(RunCandidateRow, RunCandidateRow.id == AttributionRow.run_candidate_id)
        .where(RunCandidateRow.run_id == run_id)
        .order_by(RunCandidateRow.idx)
    )
    with db.reader() as session:
        return [_attribution(session, row, name) for row, name in session.execute(query)]


def _candidate_id(session: Session, run_id: str, name: str) -> int | None:
    return session.scalar(
        select(RunCandidateRow.id).where(
            RunCandidateRow.run_id == run_id, RunCandidateRow.name == name
        )
    )


def _attribution(session: Session, row: AttributionRow, name: str) -> Attribution:
    parts = session.scalars(
        select(AttributionPartRow)
        .where(AttributionPartRow.run_candidate_id == row.run_candidate_id)
        .order_by(AttributionPartRow.idx)
    )
    plain = {n: getattr(row, n) for n in Attribution.__slots__ if n not in _NOT_COLUMNS}
    return Attribution(
        **{**plain, "notes": tuple(row.notes)},
        candidate=name,
        parts=tuple(map(_part, parts)),
        restoration=None if row.restoration is None else _restoration(row.restoration),
    )


def _part(row: AttributionPartRow) -> AttributedPart:
    plain = {n: getattr(row, n) for n in AttributedPart.__slots__ if n != "scope"}
    return AttributedPart(scope=Scope(row.scope), **plain)


def _restoration(stored: dict[str, Any]) -> Restoration:
    verdict = stored["verdict"]
    changed = {
        "scopes": tuple(map(Scope, stored["scopes"])),
        "verdict": None if verdict is None else Verdict(verdict),
    }
    return Restoration(**{**stored, **changed})
