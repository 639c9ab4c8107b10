"""Operations: who runs, what waits, how large the database is, what was applied and by whom."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import streamlit as st
from pydantic import ValidationError

from quantwatch.config.service import RetentionConfig
from quantwatch.store import applied as store_applied
from quantwatch.store import (
    attempts,
    audit,
    backlog,
    components,
    dead_letters,
    disk,
    failed_tasks,
    figures,
    leader,
    quarantine,
    schema,
    sizes,
    slots,
    timetables,
)
from quantwatch.store.applied import AppliedCheck, Section
from quantwatch.store.attempts import Telemetry
from quantwatch.store.audit import AuditEntry
from quantwatch.store.components import Seen
from quantwatch.store.failed_tasks import FailedTask
from quantwatch.store.leader import Leader
from quantwatch.store.sizes import Sizes
from quantwatch.store.slots import Slot
from quantwatch.store.timetables import Planned
from quantwatch_dashboard import clock as here
from quantwatch_dashboard.queries.connection import LONG_S, SHORT_S, database

LIVE_S = 2
MEASURED_S = 600
"""How long sizes by table are kept: measuring reads all of a SQLite file."""


@dataclass(frozen=True, slots=True)
class Service:
    """The running parts, by the database's clock."""

    leader: Leader | None
    parts: tuple[Seen, ...]
    silence_s: float | None
    """Since any scheduler looked for slots; None when none ever did."""
    slots: tuple[Slot, ...]
    quarantined: tuple[tuple[str, datetime], ...]
    oldest_delivery: datetime | None
    deliveries: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of the database and of the disk under it; None for a server's disk."""

    total_bytes: int
    disk: disk.Space | None
    revision: str | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Sizes by table, and what it took to measure them."""

    sizes: Sizes
    retention: RetentionConfig
    retention_known: bool
    """False when what was applied is not understood: then the defaults are taken."""
    seconds: float
    at: datetime


@dataclass(frozen=True, slots=True)
class Applied:
    """What the service works with. Documents hold no secrets: of them there is a digest."""

    checks: tuple[AppliedCheck, ...]
    sections: Mapping[str, Section]


@st.cache_resource(ttl=LIVE_S, max_entries=4, show_spinner=False)
def service(url: str) -> Service:
    """Return how the service does now."""
    with database(url).reader() as session:
        return Service(
            leader=leader.current(session),
            parts=tuple(components.list_components(session)),
            silence_s=figures.scheduler_silence_s(session),
            slots=slots.held(session),
            quarantined=quarantine.quarantined(session),
            oldest_delivery=dead_letters.oldest_open_at(session),
            deliveries={**_ended_deliveries(url), **backlog.lacking_by_state(session)},
        )


@st.cache_resource(ttl=LONG_S, max_entries=4, show_spinner=False)
def _ended_deliveries(url: str) -> Mapping[str, int]:
    """Counting them reads an index of a year: not with every look at what is under way."""
    with database(url).reader() as session:
        return backlog.ended_by_state(session)


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def failed(url: str, limit: int = 50) -> tuple[FailedTask, ...]:
    """Return what failed and is still open, the newest first."""
    return tuple(failed_tasks.list_failed(database(url), limit=limit))


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def num_failed(url: str) -> int:
    """Return how many things failed and are still open: all of them, not only those listed."""
    with database(url).reader() as session:
        return failed_tasks.num_open(session)


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def timetable(url: str) -> tuple[Planned, ...]:
    """Return all schedules, the next one first, those without a next run last."""
    with database(url).reader() as session:
        found = timetables.planned(session)
    never = datetime.max.replace(tzinfo=UTC)
    return tuple(
        sorted(found, key=lambda state: (state.timetable.next_slot_at or never, state.check))
    )


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def space(url: str) -> Space:
    """Return how large the database is, its disk and its schema; reads none of its content."""
    opened = database(url)
    with opened.reader() as session:
        total, revision = sizes.total_bytes(session), schema.revision(session)
    return Space(total, disk.space(opened), revision)


@st.cache_resource(ttl=MEASURED_S, max_entries=4, show_spinner=False)
def measured(url: str) -> Measured:
    """Measure the database by table. Raises StoreError where SQLite can't tell."""
    section = applied(url).sections.get("retention")
    try:
        document = {} if section is None else section.document
        retention, known = RetentionConfig.model_validate(document), True
    except ValidationError:
        retention, known = RetentionConfig(), False
    begin = time.monotonic()
    found = sizes.read_sizes(database(url), retention)
    return Measured(found, retention, known, time.monotonic() - begin, here.now())


@st.cache_resource(ttl=SHORT_S, max_entries=8, show_spinner=False)
def telemetry(url: str, limit: int) -> tuple[Telemetry, ...]:
    """Return what the GPUs did during the newest attempts."""
    with database(url).reader() as session:
        return attempts.telemetry(session, limit)


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def applied(url: str) -> Applied:
    """Return the configuration as the service applied it last."""
    with database(url).reader() as session:
        checks = tuple(store_applied.applied_checks(session).values())
        return Applied(checks, store_applied.applied_settings(session))


@st.cache_resource(ttl=SHORT_S, max_entries=16, show_spinner=False)
def changes(url: str, limit: int, subject: str | None = None) -> tuple[AuditEntry, ...]:
    """Return who changed what, the newest first."""
    return tuple(audit.list_entries(database(url), limit, subject))
