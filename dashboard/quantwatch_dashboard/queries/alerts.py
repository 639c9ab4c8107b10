"""Alerts: open and past episodes, one episode's story, silences, endpoints, dead letters."""

from collections import defaultdict
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import streamlit as st
from sqlalchemy.orm import Session

from quantwatch.alerts.flapping import flapping, window
from quantwatch.alerts.silences import in_maintenance
from quantwatch.config.watching import FlappingConfig, MaintenanceConfig
from quantwatch.domain import Json
from quantwatch.store import (
    alert_history,
    applied,
    audit,
    clock,
    dead_letters,
    endpoints,
    messages,
    silences,
)
from quantwatch.store import episodes as store_episodes
from quantwatch.store.alert_history import Judgement, Listed
from quantwatch.store.dead_letters import Delivery
from quantwatch.store.endpoints import EndpointState
from quantwatch.store.messages import Load
from quantwatch.store.silences import StoredSilence
from quantwatch_dashboard.episode_story import Moment, Sources, story
from quantwatch_dashboard.episodes import Overlay, Shown, shown
from quantwatch_dashboard.queries.connection import SHORT_S, database

MOST_ENDED = 200
"""Past episodes that are looked through."""
MOST_DELIVERIES = 50
_SOON = timedelta(hours=1)
_AROUND = timedelta(days=10)


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def open_episodes(given: str) -> tuple[Shown, ...]:
    """Return the open episodes with who knows of them, worst first."""
    with database(given).reader() as session:
        listed = alert_history.open_episodes(session)
        return shown(listed, _over(session, listed))


@st.cache_resource(ttl=SHORT_S, max_entries=16, show_spinner=False)
def ended_episodes(
    given: str, check: str | None = None, severity: str | None = None
) -> tuple[Shown, ...]:
    """Return the past episodes that ended last, the newest end first."""
    with database(given).reader() as session:
        found = alert_history.ended_episodes(session, MOST_ENDED, check, severity)
    return tuple(Shown(one) for one in found)


def episode(given: str, episode_id: str) -> Shown:
    """Return one episode. Raises UserError when there is none."""
    open_ = (one for one in open_episodes(given) if one.listed.episode.id == episode_id)
    found = next(open_, None)
    return found if found is not None else _past(given, episode_id)


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def _past(given: str, episode_id: str) -> Shown:
    with database(given).reader() as session:
        return Shown(alert_history.get_episode(session, episode_id))


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def episodes_of(given: str, alert_id: int) -> tuple[Listed, ...]:
    """Return an alert's episodes, newest first. Raises UserError when there is no such alert."""
    with database(given).reader() as session:
        store_episodes.get_alert(session, alert_id)
        return alert_history.episodes_of(session, alert_id)


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def told_story(given: str, listed: Listed) -> tuple[Moment, ...]:
    """Return what happened in an episode, oldest first."""
    known, db = listed.episode, database(given)
    until = None if known.resolved_at is None else known.resolved_at + _SOON
    with db.reader() as session:
        begin = known.opened_at
        judged = alert_history.judgements(session, listed.alert_id, begin, until)
        sent = messages.messages_on(session, listed.subject, known.id, begin, known.resolved_at)
        quiet = alert_history.silences_between(session, begin, known.resolved_at)
        now = clock.now(session)
    audited = audit.list_entries(db, 200, f"alert {listed.alert_id}")
    return story(listed, Sources(judged, sent, audited[::-1], quiet), now)


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def judged(given: str, listed: Listed) -> tuple[Judgement, ...]:
    """Return how the rule was judged in an episode, and for a while before it and after it."""
    known = listed.episode
    until = None if known.resolved_at is None else known.resolved_at + _AROUND
    with database(given).reader() as session:
        since = known.opened_at - _AROUND
        return alert_history.judgements(session, listed.alert_id, since, until)


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def active_silences(given: str) -> tuple[StoredSilence, ...]:
    """Return the silences that hold now, the one that ends first first."""
    with database(given).reader() as session:
        return tuple(silences.active_silences(session))


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def receivers(given: str) -> tuple[tuple[EndpointState, Load], ...]:
    """Return every endpoint with what it has not got, those in trouble first."""
    db = database(given)
    with db.reader() as session:
        lacking = messages.loads(session)
    found = [(one, lacking.get(one.name, Load(one.name))) for one in endpoints.list_endpoints(db)]
    return tuple(sorted(found, key=lambda pair: (_calm(*pair), pair[0].name)))


@st.cache_resource(ttl=SHORT_S, max_entries=16, show_spinner=False)
def deliveries(
    given: str, state: str | None = None, endpoint: str | None = None
) -> tuple[Delivery, ...]:
    """Return the newest deliveries, of one state and endpoint or of all."""
    found = dead_letters.list_deliveries(
        database(given), state=state, endpoint=endpoint, limit=MOST_DELIVERIES
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
        messages.unheard(session, {one.subject for one in listed}),
    )


def _alerting(session: Session) -> dict[str, Json]:
    checks = applied.applied_checks(session)
    return {name: document.get("alerting") or {} for name, document in checks.items()}


def _in_maintenance(
    session: Session, settings: dict[str, Json], checks: Collection[str]
) -> frozenset[str]:
    moment = clock.now(session)

    def windows(check: str) -> list[MaintenanceConfig]:
        given: Any = settings.get(check, {}).get("maintenance") or ()
        return [MaintenanceConfig.model_validate(each) for each in given]

    return frozenset(check for check in checks if in_maintenance(windows(check), moment))


def _flapping(
    session: Session, settings: dict[str, Json], listed: Collection[Listed]
) -> frozenset[int]:
    """Return the alerts that come and go, as their checks say what that is."""
    groups: dict[FlappingConfig, list[int]] = defaultdict(list)
    for one in listed:
        given = settings.get(one.check, {}).get("flapping") or {}
        groups[FlappingConfig.model_validate(given)].append(one.alert_id)
    now, found = clock.now(session), frozenset[int]()
    for config, mine in groups.items():
        fired = store_episodes.num_fired(session, mine, now - window(config))
        found |= flapping(fired, config)
    return found
