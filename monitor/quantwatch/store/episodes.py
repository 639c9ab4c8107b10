"""Alerts and their episodes: found, moved by guarded updates, listed.

Whoever changes them holds the check (`watched.hold_check`, or the end of one of its runs).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, insert, or_, select, update
from sqlalchemy.orm import Session

from quantwatch.domain import Json
from quantwatch.errors import NotFoundError, UserError
from quantwatch.store import audit, clock, lookups, watched
from quantwatch.store.tables import AlertRow, CheckRow, EpisodeRow

INACTIVE = "inactive"
STATE = ("state", "num_breaches", "breach_window", "num_clear", "num_missing", "episode_id")
"""What an update is guarded by: all that the decision was made of."""
OF_VALUES = ("recovered", "series_missing")
"""Reasons of an end that a run's values gave."""
_QUIET = {"synchronize_session": False}


@dataclass(frozen=True, slots=True)
class Episode:
    """One time that an alert was true. `told` are the endpoints that know of it."""

    id: str
    alert_id: int
    severity: str
    opened_at: datetime
    fired_at: datetime | None
    resolved_at: datetime | None
    resolve_reason: str | None
    first_run_id: str | None
    last_run_id: str | None
    num_runs: int
    peak_value: float | None
    peak_kind: str
    told: tuple[str, ...]
    muted_at: datetime | None
    reminded_at: datetime | None
    acked_at: datetime | None
    acked_by: str | None
    ack_comment: str | None
    evidence: Json


@dataclass(frozen=True, slots=True)
class StoredAlert:
    """An alert as it stands, with its open episode."""

    id: int
    check_id: int
    check: str
    candidate: str
    rule: str
    state: str
    severity: str | None
    num_breaches: int
    breach_window: int
    num_clear: int
    num_missing: int
    rule_sha: str | None
    episode_id: str | None
    awaits_run_id: str | None
    episode: Episode | None

    @property
    def labels(self) -> dict[str, str]:
        """What silences match on."""
        severity = self.episode.severity if self.episode is not None else self.severity
        return {
            "check": self.check,
            "candidate": self.candidate,
            "rule": self.rule,
            "severity": severity or "",
        }


def find_alerts(
    session: Session, check_id: int, keys: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], StoredAlert]:
    """Return alerts by (candidate, rule); those that are new are added as inactive."""
    wanted = sorted(set(keys))
    found = _by_key(session, check_id)
    # Sorted: two writers that insert the same rows in another order would wait for each other.
    new = [(name, rule) for name, rule in wanted if (name, rule) not in found]
    if new:
        rows = [{"check_id": check_id, "candidate": name, "rule": rule} for name, rule in new]
        session.execute(lookups.insert_new(session, AlertRow), rows)
        found = _by_key(session, check_id)
    return {key: found[key] for key in wanted}


def open_alerts(session: Session, check_id: int | None = None) -> list[StoredAlert]:
    """Return the alerts that are not inactive, of one check or of all."""
    query = _query().where(AlertRow.state != INACTIVE)
    return _read(session, query if check_id is None else query.where(AlertRow.check_id == check_id))


def all_alerts(session: Session) -> list[StoredAlert]:
    """Return every alert that ever was, by check, candidate and rule."""
    return _read(session, _query())


def get_alert(session: Session, alert_id: int) -> StoredAlert:
    """Return an alert. Raises UserError when there is none of that id."""
    found = _read(session, _query().where(AlertRow.id == alert_id))
    if not found:
        raise NotFoundError(
            f"there is no alert {alert_id}; `quantwatch alerts list --all` shows them"
        )
    return found[0]


def move(session: Session, before: StoredAlert, values: Mapping[str, Any]) -> bool:
    """Change an alert that is still as it was read; return False when somebody else was faster."""
    guard = [getattr(AlertRow, name).is_not_distinct_from(getattr(before, name)) for name in STATE]
    change = (
        update(AlertRow)
        .where(AlertRow.id == before.id, *guard)
        .values(**values)
        .returning(AlertRow.id)
        .execution_options(**_QUIET)
    )
    return session.execute(change).first() is not None


def add_episode(session: Session, episode: Episode) -> None:
    """Write a new episode."""
    session.execute(insert(EpisodeRow).values(**_values(episode)))


def save_episode(session: Session, episode: Episode) -> None:
    """Write an episode that is open; one that was closed meanwhile stays as it is."""
    values = _values(episode)
    change = update(EpisodeRow).where(
        EpisodeRow.id == values.pop("id"), EpisodeRow.resolved_at.is_(None)
    )
    session.execute(change.values(**values).execution_options(**_QUIET))


def note_told(
    session: Session, alert_id: int, episode_id: str, values: Mapping[str, Any], num_events: int
) -> None:
    """Note what was told of an episode, open or closed, and count the events."""
    told = update(EpisodeRow).where(EpisodeRow.id == episode_id).values(**values)
    session.execute(told.execution_options(**_QUIET))
    count = update(AlertRow).where(AlertRow.id == alert_id).values(seq=AlertRow.seq + num_events)
    session.execute(count.execution_options(**_QUIET))


def acknowledge(
    session: Session, alert_id: int, actor: str, comment: str, *, episode_id: str | None = None
) -> StoredAlert:
    """Note that somebody looks after an alert; audited. Raises UserError unless it fires.

    With `episode_id` also when that episode, which somebody has looked at, is no longer the open
    one: another may have another cause.
    """
    # Whoever moves the alert writes the whole episode: one at a time.
    watched.hold_check(session, get_alert(session, alert_id).check)
    alert = get_alert(session, alert_id)
    if episode_id is not None and alert.episode_id != episode_id:
        now = "" if alert.episode_id is None else " and another one is open; look at that one first"
        raise UserError(f"the episode of alert {alert_id} that was to be acknowledged is over{now}")
    if alert.episode is None or alert.episode.fired_at is None:
        raise UserError(f"alert {alert_id} is {alert.state}; only one that fires is acknowledged")
    acked = replace(alert.episode, acked_at=clock.now(session), acked_by=actor, ack_comment=comment)
    save_episode(session, acked)
    known = alert.episode.acked_by
    before = None if known is None else {"by": known, "comment": alert.episode.ack_comment}
    after = {"by": actor, "comment": comment}
    audit.note(session, actor, "acknowledge", f"alert {alert_id}", before, after)
    return get_alert(session, alert_id)


def num_fired(session: Session, alert_ids: Iterable[int], since: datetime) -> dict[int, int]:
    """Return how many episodes of each alert have fired since an instant, of those that values end.

    One that a person ended, by an edited rule, another pin or by hand, is no coming and going.
    """
    by_values = or_(EpisodeRow.resolve_reason.is_(None), EpisodeRow.resolve_reason.in_(OF_VALUES))
    rows = session.execute(
        select(EpisodeRow.alert_id, func.count())
        .where(EpisodeRow.alert_id.in_(list(alert_ids)), EpisodeRow.fired_at >= since, by_values)
        .group_by(EpisodeRow.alert_id)
    )
    return {row[0]: row[1] for row in rows}


def list_episodes(session: Session, alert_id: int, limit: int = 50) -> list[Episode]:
    """Return an alert's episodes, newest first."""
    rows = session.scalars(
        select(EpisodeRow)
        .where(EpisodeRow.alert_id == alert_id)
        .order_by(EpisodeRow.opened_at.desc(), EpisodeRow.id.desc())
        .limit(limit)
        .execution_options(populate_existing=True)
    )
    return [as_record(row) for row in rows]


def _by_key(session: Session, check_id: int) -> dict[tuple[str, str], StoredAlert]:
    found = _read(session, _query().where(AlertRow.check_id == check_id))
    return {(alert.candidate, alert.rule): alert for alert in found}


def _query() -> Select[*tuple[Any, ...]]:
    return (
        select(AlertRow, CheckRow.name, EpisodeRow)
        .join(CheckRow, CheckRow.id == AlertRow.check_id)
        .outerjoin(EpisodeRow, EpisodeRow.id == AlertRow.episode_id)
        .order_by(CheckRow.name, AlertRow.candidate, AlertRow.rule)
        # Updates go around the session's own copies.
        .execution_options(populate_existing=True)
    )


def _read(session: Session, query: Select[*tuple[Any, ...]]) -> list[StoredAlert]:
    own = [name for name in StoredAlert.__slots__ if name not in ("check", "episode")]
    return [
        StoredAlert(
            **{name: getattr(row, name) for name in own},
            check=check,
            episode=None if episode is None else as_record(episode),
        )
        for row, check, episode in session.execute(query)
    ]


def as_record(row: EpisodeRow) -> Episode:
    """Return an episode as a record without its session."""
    values = {name: getattr(row, name) for name in Episode.__slots__}
    return Episode(**{**values, "told": tuple(row.told)})


def _values(episode: Episode) -> dict[str, Any]:
    return {name: getattr(episode, name) for name in Episode.__slots__}
