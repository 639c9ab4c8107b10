"""What each rule of a candidate could have found: rows beside the candidate's other results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from quantwatch.domain import Detectable, RunResult, Scope
from quantwatch.store.session import Database
from quantwatch.store.tables import DetectableRow, RunCandidateRow

_FIELDS = tuple(Detectable.__slots__)


def insert_detectables(session: Session, result: RunResult, ids: Mapping[str, int]) -> None:
    """Write what the candidates' rules could have found; `ids` are the candidates' by name."""
    rows = [
        {"run_candidate_id": ids[candidate.name], "idx": idx, **asdict(each)}
        for candidate in result.candidates
        for idx, each in enumerate(candidate.detectable)
    ]
    if rows:
        session.execute(insert(DetectableRow), rows)


def read_detectables(session: Session, ids: Sequence[int]) -> dict[int, tuple[Detectable, ...]]:
    """Return them by candidate id, in the order of the rules."""
    rows = session.scalars(
        select(DetectableRow)
        .where(DetectableRow.run_candidate_id.in_(ids))
        .order_by(DetectableRow.run_candidate_id, DetectableRow.idx)
    )
    found: dict[int, tuple[Detectable, ...]] = {}
    for row in rows:
        known = found.get(row.run_candidate_id, ())
        found[row.run_candidate_id] = (*known, _record(row))
    return found


def _record(row: DetectableRow) -> Detectable:
    plain = {name: getattr(row, name) for name in _FIELDS if name != "scope"}
    return Detectable(**plain, scope=None if row.scope is None else Scope(row.scope))


def detectables_of(db: Database, run_id: str) -> list[tuple[str, tuple[Detectable, ...]]]:
    """Return what the rules of a run's candidates could have found, in the candidates' order.

    Candidates of which nothing is known are left out.
    """
    query = select(RunCandidateRow.id, RunCandidateRow.name).where(RunCandidateRow.run_id == run_id)
    with db.reader() as session:
        candidates = session.execute(query.order_by(RunCandidateRow.idx)).all()
        found = read_detectables(session, [key for key, _ in candidates])
    return [(name, found[key]) for key, name in candidates if key in found]
