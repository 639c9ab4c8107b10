"""Alerts as people look through them: open and past episodes, and what became of one."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from quantwatch.errors import NotFoundError
from quantwatch.store import episodes
from quantwatch.store.episodes import Episode, StoredAlert
from quantwatch.store.tables import AlertRow, CheckRow, EpisodeRow, RuleEvaluationRow

ENDED = "ended"
"""State of an episode that is over, whatever its alert does now."""
_MOST_JUDGED = 500


@dataclass(frozen=True, slots=True)
class Listed:
    """An episode with what it is about. `state` is that of its alert while it is open."""

    alert_id: int
    check: str
    candidate: str
    rule: str
    state: str
    awaits_run_id: str | None
    num_breaches: int
    num_clear: int
    episode: Episode

    @property
    def subject(self) -> str:
        """What the messages on it are about."""
        return f"{self.check}/{self.candidate}"

    @property
    def labels(self) -> dict[str, str]:
        """What silences match on."""
        return {
            "check": self.check,
            "candidate": self.candidate,
            "rule": self.rule,
            "severity": self.episode.severity,
        }


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a rule was judged on one run."""

    run_id: str
    at: datetime
    outcome: str
    value: float | None
    value_kind: str
    threshold: float | None


def open_episodes(session: Session) -> tuple[Listed, ...]:
    """Return the episode of every alert that is not inactive, by check, candidate and rule."""
    found = episodes.open_alerts(session)
    return tuple(
        _record(alert, alert.check, alert.episode) for alert in found if alert.episode is not None
    )


def ended_episodes(
    session: Session, limit: int, check: str | None = None, severity: str | None = None
) -> tuple[Listed, ...]:
    """Return the episodes that ended last, the newest end first."""
    query = _query().where(EpisodeRow.resolved_at.is_not(None))
    if check is not None:
        query = query.where(CheckRow.name == check)
    if severity is not None:
        query = query.where(EpisodeRow.severity == severity)
    newest = query.order_by(EpisodeRow.resolved_at.desc(), EpisodeRow.id.desc()).limit(limit)
    return _read(session, newest)


def get_episode(session: Session, episode_id: str) -> Listed:
    """Return an episode. Raises UserError when there is none of that id."""
    found = _read(session, _query().where(EpisodeRow.id == episode_id))
    if not found:
        raise NotFoundError(f"There is no episode {episode_id!r} of any alert.")
    return found[0]


def episodes_of(session: Session, alert_id: int, limit: int = 20) -> tuple[Listed, ...]:
    """Return an alert's episodes, the newest first."""
    query = _query().where(EpisodeRow.alert_id == alert_id)
    return _read(
        session, query.order_by(EpisodeRow.opened_at.desc(), EpisodeRow.id.desc()).limit(limit)
    )


def judgements(
    session: Session, alert_id: int, since: datetime, until: datetime | None = None
) -> tuple[Judgement, ...]:
    """Return how a rule was judged in a time, oldest first: the last `_MOST_JUDGED`."""
    row = RuleEvaluationRow
    query = select(row).where(row.alert_id == alert_id, row.evaluated_at >= since)
    if until is not None:
        query = query.where(row.evaluated_at <= until)
    newest = query.order_by(row.evaluated_at.desc(), row.run_id.desc()).limit(_MOST_JUDGED)
    return tuple(
        Judgement(
            each.run_id,
            each.evaluated_at,
            each.outcome,
            each.value,
            each.value_kind,
            each.threshold,
        )
        for each in reversed(session.scalars(newest).all())
    )


def _query() -> Select[*tuple[Any, ...]]:
    return (
        select(AlertRow, CheckRow.name, EpisodeRow)
        .join(AlertRow, AlertRow.id == EpisodeRow.alert_id)
        .join(CheckRow, CheckRow.id == AlertRow.check_id)
        .execution_options(populate_existing=True)
    )


def _read(session: Session, query: Select[*tuple[Any, ...]]) -> tuple[Listed, ...]:
    rows = session.execute(query)
    return tuple(_record(row, check, episodes.as_record(found)) for row, check, found in rows)


def _record(row: AlertRow | StoredAlert, check: str, episode: Episode) -> Listed:
    return Listed(
        alert_id=row.id,
        check=check,
        candidate=row.candidate,
        rule=row.rule,
        state=row.state if episode.resolved_at is None else ENDED,
        awaits_run_id=row.awaits_run_id,
        num_breaches=row.num_breaches,
        num_clear=row.num_clear,
        episode=episode,
    )
