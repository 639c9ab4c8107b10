"""Silences: who keeps which alerts from being told, and until when."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from quantwatch.errors import UserError
from quantwatch.store import audit, clock
from quantwatch.store.tables import AlertRow, CheckRow, EpisodeRow, RunCandidateRow, SilenceRow

_FIRING = ("firing", "recovering")


@dataclass(frozen=True, slots=True)
class StoredSilence:
    """A silence as somebody made it. It was lifted early when `ends_at` is moved forward."""

    id: int
    matcher: Mapping[str, str]
    starts_at: datetime
    ends_at: datetime
    author: str
    comment: str


def add_silence(
    session: Session, matcher: Mapping[str, str], length: timedelta, author: str, comment: str
) -> StoredSilence:
    """Silence from now on; audited."""
    moment = clock.now(session)
    row = SilenceRow(
        matcher=dict(matcher),
        starts_at=moment,
        ends_at=moment + length,
        author=author,
        comment=comment,
        created_at=moment,
    )
    session.add(row)
    session.flush()
    found = _record(row)
    audit.note(session, author, "silence", f"silence {row.id}", None, _document(found))
    return found


def lift_silence(session: Session, silence_id: int, actor: str) -> StoredSilence:
    """End a silence now; audited. Raises UserError when there is none of that id that holds."""
    moment = clock.now(session)
    row = session.get(SilenceRow, silence_id)
    ended = None if row is None else _record(row)
    done = session.execute(
        update(SilenceRow)
        .where(SilenceRow.id == silence_id, SilenceRow.ends_at > moment)
        .values(ends_at=moment)
        .returning(SilenceRow.id)
        .execution_options(synchronize_session=False)
    ).first()
    if ended is None or done is None:
        known = ", ".join(str(silence.id) for silence in active_silences(session)) or "none"
        raise UserError(f"no silence {silence_id} holds now; those that do: {known}")
    audit.note(session, actor, "unsilence", f"silence {silence_id}", _document(ended), None)
    return ended


def active_silences(session: Session) -> list[StoredSilence]:
    """Return the silences that hold now, the one that ends first first."""
    moment = clock.now(session)
    rows = session.scalars(
        select(SilenceRow)
        .where(SilenceRow.starts_at <= moment, SilenceRow.ends_at > moment)
        .order_by(SilenceRow.ends_at, SilenceRow.id)
    )
    return [_record(row) for row in rows]


def silences_between(
    session: Session, since: datetime, until: datetime | None = None
) -> tuple[StoredSilence, ...]:
    """Return the silences that held at some time in between, the first one first."""
    query = select(SilenceRow).where(SilenceRow.ends_at >= since)
    if until is not None:
        query = query.where(SilenceRow.starts_at <= until)
    rows = session.scalars(query.order_by(SilenceRow.starts_at, SilenceRow.id))
    return tuple(_record(row) for row in rows)


def known_labels(session: Session) -> dict[str, set[str]]:
    """Return the checks (applied or run), candidates and rules (of alerts that there ever were)
    that this database knows: what a silence may be about.
    """
    alerts = session.execute(select(AlertRow.candidate, AlertRow.rule)).all()
    measured = session.scalars(select(RunCandidateRow.name).distinct())
    return {
        "check": set(session.scalars(select(CheckRow.name))),
        "candidate": {*measured, *(row.candidate for row in alerts)},
        "rule": {row.rule for row in alerts},
    }


def firing_labels(session: Session) -> list[dict[str, str]]:
    """Return what silences match on, of every alert that fires; nothing else of it is read."""
    severity = func.coalesce(EpisodeRow.severity, AlertRow.severity, "")
    query = (
        select(CheckRow.name.label("check"), AlertRow.candidate, AlertRow.rule)
        .add_columns(severity.label("severity"))
        .join(CheckRow, CheckRow.id == AlertRow.check_id)
        .outerjoin(EpisodeRow, EpisodeRow.id == AlertRow.episode_id)
        .where(AlertRow.state.in_(_FIRING))
    )
    return [dict(row) for row in session.execute(query).mappings()]


def has_ended(session: Session, silence_id: int) -> bool:
    """Say whether there is a silence of that id and it holds no longer."""
    ends_at = session.scalar(select(SilenceRow.ends_at).where(SilenceRow.id == silence_id))
    return ends_at is not None and ends_at <= clock.now(session)


def _record(row: SilenceRow) -> StoredSilence:
    return StoredSilence(
        **{name: getattr(row, name) for name in StoredSilence.__slots__},
    )


def _document(silence: StoredSilence) -> dict[str, object]:
    return {
        "matcher": dict(silence.matcher),
        "starts_at": silence.starts_at.isoformat(),
        "ends_at": silence.ends_at.isoformat(),
        "author": silence.author,
        "comment": silence.comment,
    }
