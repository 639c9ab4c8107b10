"""Alerts: open and past episodes, one episode's story, silences, endpoints, dead letters."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import streamlit as st
from sqlalchemy.orm import Session

from quantwatch.alerts.flapping import flapping, window
from quantwatch.alerts.silences import in_maintenance, matches
from quantwatch.config.parsing import parse
from quantwatch.config.watching import FlappingConfig, MaintenanceConfig
from quantwatch.domain import Json
from quantwatch.errors import ConfigError
from quantwatch.store import (
    alert_history,
    applied,
    audit,
    backlog,
    clock,
    dead_letters,
    endpoints,
    silences,
    told,
)
from quantwatch.store import episodes as store_episodes
from quantwatch.store.alert_history import Judgement, Listed
from quantwatch.store.backlog import Load
from quantwatch.store.dead_letters import Delivery
from quantwatch.store.endpoints import EndpointState
from quantwatch.store.silences import StoredSilence
from quantwatch_dashboard.logic.episode_story import Moment, Sources, story
from quantwatch_dashboard.logic.episodes import Overlay, ShownEpisode, shown
from quantwatch_dashboard.queries.connection import SHORT_S, database

MOST_ENDED = 200
"""Past episodes that are looked through."""
MOST_DELIVERIES = 50
_SOON = timedelta(hours=1)
_AROUND = timedelta(days=10)


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def open_episodes(url: str) -> tuple[ShownEpisode, ...]:
    """Return the open episodes with who knows of them, worst first."""
    with database(url).reader() as session:
        listed = alert_history.open_episodes(session)
        return shown(listed, _over(session, listed))


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def not_understood(url: str) -> tuple[str, ...]:
    """Return checks with open alerts whose applied settings this version can't read.

    What is in maintenance or flaps isn't known of their alerts.
    """
    checks = sorted({one.listed.check for one in open_episodes(url)})
    with database(url).reader() as session:
        known = _alerting(session)
    return tuple(check for check in checks if known.get(check, _Alerting()) is None)


@st.cache_resource(ttl=SHORT_S, max_entries=16, show_spinner=False)
def ended_episodes(
    url: str, check: str | None = None, severity: str | None = None
) -> tuple[ShownEpisode, ...]:
    """Return the past episodes that ended last, the newest end first."""
    with database(url).reader() as session:
        found = alert_history.ended_episodes(session, MOST_ENDED, check, severity)
    return tuple(ShownEpisode(one) for one in found)


def episode(url: str, episode_id: str) -> ShownEpisode:
    """Return one episode. Raises UserError when there is none."""
    open_ = (one for one in open_episodes(url) if one.listed.episode.id == episode_id)
    found = next(open_, None)
    return found if found is not None else _past(url, episode_id)


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def _past(url: str, episode_id: str) -> ShownEpisode:
    with database(url).reader() as session:
        return ShownEpisode(alert_history.get_episode(session, episode_id))


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def episodes_of(url: str, alert_id: int) -> tuple[Listed, ...]:
    """Return an alert's episodes, newest first. Raises UserError when there is no such alert."""
    with database(url).reader() as session:
        store_episodes.get_alert(session, alert_id)
        return alert_history.episodes_of(session, alert_id)


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def told_story(url: str, listed: Listed) -> tuple[Moment, ...]:
    """Return what happened in an episode, oldest first."""
    known, db = listed.episode, database(url)
    until = None if known.resolved_at is None else known.resolved_at + _SOON
    with db.reader() as session:
        begin = known.opened_at
        judged = alert_history.judgements(session, listed.alert_id, begin, until)
        sent = told.messages_on(session, listed.subject, known.id, begin, known.resolved_at)
        quiet = silences.silences_between(session, begin, known.resolved_at)
        now = clock.now(session)
    audited = audit.list_entries(db, 200, f"alert {listed.alert_id}")
    return story(listed, Sources(judged, sent, audited[::-1], quiet), now)


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def judged(url: str, listed: Listed) -> tuple[Judgement, ...]:
    """Return how the rule was judged in an episode, and for a while before it and after it."""
    known = listed.episode
    until = None if known.resolved_at is None else known.resolved_at + _AROUND
    with database(url).reader() as session:
        since = known.opened_at - _AROUND
        return alert_history.judgements(session, listed.alert_id, since, until)


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def active_silences(url: str) -> tuple[StoredSilence, ...]:
    """Return the silences that hold now, the one that ends first first."""
    with database(url).reader() as session:
        return tuple(silences.active_silences(session))


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def silenced(url: str) -> Mapping[str, int]:
    """Return how many firing alerts of each check are silenced now."""
    with database(url).reader() as session:
        quiet = silences.active_silences(session)
        alerts = silences.firing_labels(session) if quiet else []
    return Counter(
        labels["check"]
        for labels in alerts
        if any(matches(silence.matcher, labels) for silence in quiet)
    )


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def receivers(url: str) -> tuple[tuple[EndpointState, Load], ...]:
    """Return every endpoint with what it has not got, those in trouble first."""
    db = database(url)
    with db.reader() as session:
        lacking = backlog.loads(session)
    found = [(one, lacking.get(one.name, Load(one.name))) for one in endpoints.list_endpoints(db)]
    return tuple(sorted(found, key=lambda pair: (_calm(*pair), pair[0].name)))


@st.cache_resource(ttl=SHORT_S, max_entries=16, show_spinner=False)
def deliveries(
    url: str, state: str | None = None, endpoint: str | None = None
) -> tuple[Delivery, ...]:
    """Return the newest deliveries, of one state and endpoint or of all."""
    found = dead_letters.list_deliveries(
        database(url), state=state, endpoint=endpoint, limit=MOST_DELIVERIES
    )
    return tuple(found)


def _calm(state: EndpointState, load: Load) -> tuple[bool, bool]:
    working = state.state in ("enabled", applied.REMOVED)
    return working, not load.num_dead and state.failing_since is None


def _over(session: Session, listed: Collection[Listed]) -> Overlay:
    settings = _alerting(session)
    return Overlay(
        tuple(silences.active_silences(session)),
        _in_maintenance(session, settings, {one.check for one in listed}),
        _flapping(session, settings, listed),
        backlog.addressed(
            session,
            {one.subject for one in listed},
            {name for one in listed for name in one.episode.told},
        ),
    )


@dataclass(frozen=True, slots=True)
class _Alerting:
    """What a check's settings say about alerts that are not told at once."""

    maintenance: tuple[MaintenanceConfig, ...] = ()
    flapping: FlappingConfig = field(default_factory=FlappingConfig)


_Settings = Mapping[str, _Alerting | None]
"""By check; None for those that were applied by a version with other settings."""


def _alerting(session: Session) -> _Settings:
    checks = applied.applied_checks(session)
    return {name: _read(one.config.get("alerting") or {}) for name, one in checks.items()}


def _read(section: Json) -> _Alerting | None:
    windows: Any = section.get("maintenance") or ()
    flapping: Any = section.get("flapping") or {}
    try:
        return _Alerting(
            tuple(parse(MaintenanceConfig, each, "maintenance") for each in windows),
            parse(FlappingConfig, flapping, "flapping"),
        )
    except ConfigError:
        return None


def _in_maintenance(
    session: Session, settings: _Settings, checks: Collection[str]
) -> frozenset[str]:
    moment = clock.now(session)
    known = {check: settings.get(check) or _Alerting() for check in checks}
    return frozenset(c for c, one in known.items() if in_maintenance(one.maintenance, moment))


def _flapping(session: Session, settings: _Settings, listed: Collection[Listed]) -> frozenset[int]:
    """Return the alerts that come and go, as their checks say what that is."""
    groups: dict[FlappingConfig, list[int]] = defaultdict(list)
    for one in listed:
        known = settings.get(one.check, _Alerting())
        if known is not None:
            groups[known.flapping].append(one.alert_id)
    now, found = clock.now(session), frozenset[int]()
    for config, mine in groups.items():
        fired = store_episodes.num_fired(session, mine, now - window(config))
        found |= flapping(fired, config)
    return found
