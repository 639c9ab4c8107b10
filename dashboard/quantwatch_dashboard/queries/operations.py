"""Operations: who runs, what waits, how large the database is, what was applied and by whom."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import streamlit as st
from pydantic import ValidationError

from quantwatch.config.service import RetentionConfig
from quantwatch.store import (
    audit,
    components,
    dead_letters,
    disk,
    failed_tasks,
    figures,
    operations,
    sizes,
)
from quantwatch.store.audit import AuditEntry
from quantwatch.store.components import Seen
from quantwatch.store.failed_tasks import FailedTask
from quantwatch.store.operations import AppliedCheck, Leader, Planned, Slot, Telemetry
from quantwatch.store.sizes import Sizes
from quantwatch_dashboard import clock as here
from quantwatch_dashboard.queries.connection import SHORT_S, database

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
    sections: tuple[tuple[str, Mapping[str, object], datetime], ...]


@st.cache_resource(ttl=LIVE_S, max_entries=4, show_spinner=False)
def service(url: str) -> Service:
    """Return how the service does now."""
    with database(url).reader() as session:
        return Service(
            leader=operations.leader(session),
            parts=tuple(components.list_components(session)),
            silence_s=figures.scheduler_silence_s(session),
            slots=operations.slots(session),
            quarantined=operations.quarantined(session),
            oldest_delivery=dead_letters.oldest_open_at(session),
            deliveries=operations.deliveries_by_state(session),
        )


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
        found = operations.timetable(session)
    never = datetime.max.replace(tzinfo=UTC)
    return tuple(
        sorted(found, key=lambda state: (state.timetable.next_slot_at or never, state.check))
    )


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def space(url: str) -> Space:
    """Return how large the database is, its disk and its schema; reads none of its content."""
    opened = database(url)
    with opened.reader() as session:
        total, revision = sizes.total_bytes(session), operations.schema_revision(session)
    return Space(total, disk.space(opened), revision)


@st.cache_resource(ttl=MEASURED_S, max_entries=4, show_spinner=False)
def measured(url: str) -> Measured:
    """Measure the database by table. Raises StoreError where SQLite can't tell."""
    document = next((d for name, d, _ in applied(url).sections if name == "retention"), {})
    try:
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
        return operations.telemetry(session, limit)


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def applied(url: str) -> Applied:
    """Return the configuration as the service applied it last."""
    with database(url).reader() as session:
        return Applied(operations.checks_applied(session), operations.settings_applied(session))


@st.cache_resource(ttl=SHORT_S, max_entries=16, show_spinner=False)
def changes(url: str, limit: int, subject: str | None = None) -> tuple[AuditEntry, ...]:
    """Return who changed what, the newest first."""
    return tuple(audit.list_entries(database(url), limit, subject))
