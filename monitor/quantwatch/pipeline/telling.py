"""From what changed to messages in the outbox: who hears of it, who is silenced, what it says."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from quantwatch.alerts import flapping as flaps
from quantwatch.alerts.grouping import Change, Message, messages
from quantwatch.alerts.silences import Silence, in_maintenance, is_silenced
from quantwatch.config.schema import CheckConfig, Config
from quantwatch.config.watching import FlappingConfig
from quantwatch.domain import Severity
from quantwatch.pipeline.moves import Changed
from quantwatch.report.message import Member, Notice, body
from quantwatch.report.numbers import Number
from quantwatch.store import clock, episodes, outbox
from quantwatch.store.episodes import Episode, StoredAlert
from quantwatch.store.silences import active_silences


@dataclass(frozen=True, slots=True)
class Desk:
    """Everything that decides who is told about a check at one moment."""

    check: str
    settings: CheckConfig | None
    """None when the check is gone and its configuration isn't known any more."""
    service: Config
    silences: tuple[Silence, ...]
    maintenance: bool
    moment: datetime

    def is_muted(self, alert: StoredAlert, episode: Episode) -> bool:
        """Say whether nothing new may be told of an alert now."""
        labels = {**alert.labels, "severity": episode.severity}
        return self.maintenance or is_silenced(self.silences, labels, self.moment)

    def audience(self, changed: Changed) -> tuple[str, ...]:
        """Return the endpoints that hear of a change: what was told is taken back everywhere."""
        configured = self.service.endpoints
        if changed.change in (Change.RESOLVED, Change.REMINDER):
            return tuple(name for name in changed.episode.told if name in configured)
        if self.settings is None:
            return ()
        wanted = self.settings.alerting.endpoints
        names = tuple(configured) if wanted is None else wanted
        severity = changed.episode.severity
        known = (name for name in names if name in configured)
        return tuple(name for name in known if severity in configured[name].severities)


def desk(session: Session, check: str, settings: CheckConfig | None, service: Config) -> Desk:
    """Return the desk for a check, now."""
    moment = clock.now(session)
    silences = tuple(
        Silence(found.matcher, found.starts_at, found.ends_at) for found in active_silences(session)
    )
    windows = () if settings is None else settings.alerting.maintenance
    return Desk(check, settings, service, silences, in_maintenance(windows, moment), moment)


def tell(session: Session, at: Desk, changes: Sequence[Changed]) -> int:
    """Write the messages on what changed; return how many. Ends before beginnings."""
    told = 0
    for group in _by_candidate(changes).values():
        ends = [changed for changed in group if changed.change is Change.RESOLVED]
        told += _tell_group(session, at, ends)
        told += _tell_group(session, at, _audible(session, at, group))
    return told


def flapping(session: Session, alert_ids: Iterable[int], at: Desk) -> frozenset[int]:
    """Return which alerts fire again and again."""
    config = FlappingConfig() if at.settings is None else at.settings.alerting.flapping
    since = at.moment - flaps.window(config)
    return flaps.flapping(episodes.num_fired(session, alert_ids, since), config)


def _by_candidate(changes: Iterable[Changed]) -> dict[str, list[Changed]]:
    groups: dict[str, list[Changed]] = defaultdict(list)
    for changed in changes:
        groups[changed.alert.candidate].append(changed)
    return groups


def _audible(session: Session, at: Desk, group: Iterable[Changed]) -> list[Changed]:
    """Return what may be told of now; note of the rest that it waits."""
    audible = []
    for changed in group:
        if changed.change is Change.RESOLVED:
            continue
        if not at.is_muted(changed.alert, changed.episode):
            audible.append(changed)
        elif changed.episode.muted_at is None:
            episodes.save_episode(session, replace(changed.episode, muted_at=at.moment))
    return audible


def _tell_group(session: Session, at: Desk, group: Sequence[Changed]) -> int:
    if not group:
        return 0
    by_id = {changed.alert.id: changed for changed in group}
    planned = messages(
        {number: changed.change for number, changed in by_id.items()},
        {number: at.audience(changed) for number, changed in by_id.items()},
        _told_before(session, at, group[0].alert, by_id),
    )
    unsteady = flapping(session, by_id, at)
    for message in planned:
        members = [_member(by_id[number], number in unsteady) for number in message.members]
        _publish(session, at, group[0].alert.candidate, message, members)
    for number, changed in by_id.items():
        _note(session, at, changed, [one for one in planned if number in one.members])
    return len(planned)


def _told_before(
    session: Session, at: Desk, alert: StoredAlert, but: Mapping[int, Changed]
) -> dict[str, frozenset[int]]:
    """Return which other open alerts of the group each endpoint knows of."""
    others = [
        other
        for other in episodes.open_alerts(session, alert.check_id)
        if other.candidate == alert.candidate and other.id not in but
    ]
    return {
        endpoint: frozenset(
            other.id for other in others if other.episode and endpoint in other.episode.told
        )
        for endpoint in at.service.endpoints
    }


def _publish(
    session: Session, at: Desk, candidate: str, message: Message, members: Sequence[Member]
) -> None:
    notice = Notice(
        type=message.type,
        reason=message.reason,
        check=at.check,
        candidate=candidate,
        moment=at.moment,
        members=members,
        num_open=message.num_open,
        dashboard_url=at.service.service.dashboard_url,
    )
    event = outbox.Event(message.type, f"{at.check}/{candidate}", body(notice))
    outbox.publish(session, event, message.endpoints)


def _member(changed: Changed, unsteady: bool) -> Member:
    episode = changed.episode
    return Member(
        alert_id=changed.alert.id,
        episode_id=episode.id,
        rule=changed.alert.rule,
        severity=Severity(episode.severity),
        change=changed.change.value,
        since=episode.opened_at,
        first_run=episode.first_run_id,
        num_runs=episode.num_runs,
        evidence=episode.evidence,
        peak=Number(episode.peak_value, episode.peak_kind),
        resolve_reason=episode.resolve_reason,
        flapping=unsteady,
    )


def _note(session: Session, at: Desk, changed: Changed, said: Sequence[Message]) -> None:
    """Remember who knows. What concerned nobody waits for nothing either."""
    endpoints = [endpoint for message in said for endpoint in message.endpoints]
    told = tuple(dict.fromkeys((*changed.episode.told, *endpoints)))
    values: dict[str, Any] = {"told": told, "muted_at": None}
    if said:
        values["reminded_at"] = at.moment
    episodes.note_told(session, changed.alert.id, changed.episode.id, values, len(said))
