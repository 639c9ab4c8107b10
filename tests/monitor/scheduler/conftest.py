"""Checks with schedules, and the moved clock."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from quantwatch.config.load import parse
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunStatus
from quantwatch.observability import labels, meters
from quantwatch.store import clock, schedules
from quantwatch.store.applied import apply_checks
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, RunRow, ScheduleRow

START = datetime(2026, 3, 27, 12, 0, tzinfo=UTC)
"""Two days before the clocks of Berlin change."""


def check_config(schedule: dict[str, Any] | None, **fields: Any) -> CheckConfig:
    """A small check with this schedule."""
    section = {} if schedule is None else {"schedule": {"jitter": "0s", **schedule}}
    data = {
        "suite": "core-v1:demo",
        "reference": {"model": "ref"},
        "candidates": [{"name": "int8", "model": "cand"}],
        **section,
        **fields,
    }
    return parse(CheckConfig, data, "test")


@dataclass
class Place:
    """The service's database as the tests handle it."""

    db: Database
    start: datetime = START

    def apply(self, **checks: dict[str, Any] | None) -> None:
        """Make these the checks in use, as the service does."""
        configs = {name: check_config(schedule) for name, schedule in checks.items()}
        documents = {name: config.model_dump(mode="json") for name, config in configs.items()}
        with self.db.writer() as session:
            apply_checks(session, documents, "/checks")
            schedules.apply(session, configs)

    def set_clock(self, moment: datetime) -> None:
        """Move the database's clock."""
        self.db.clock_shift = timedelta()
        with self.db.reader() as session:
            self.db.clock_shift = moment - clock.now(session)

    def slots(self, check: str = "nightly") -> list[tuple[str, str]]:
        """Every slot of a check: its instant, and `queued`, another status, or why it was skipped."""
        query = (
            select(RunRow.slot_key, RunRow.status, RunRow.reason_code)
            .join(CheckRow, CheckRow.id == RunRow.check_id)
            .where(CheckRow.name == check, RunRow.trigger == "schedule")
            .order_by(RunRow.slot_key)
        )
        with self.db.reader() as session:
            return [(key[2:], code or status) for key, status, code in session.execute(query)]

    def schedule(self, check: str = "nightly") -> schedules.ScheduleState:
        """Where a check's schedule stands."""
        with self.db.reader() as session:
            return schedules.states_by_check(session)[check]

    def end_runs(self) -> None:
        """Let every run end, as a worker would."""
        ended = {"status": RunStatus.FAILED.value, "finished_at": START}
        with self.db.writer() as session:
            unended = RunRow.status.in_([s.value for s in RunStatus if not s.is_ended])
            session.execute(update(RunRow).where(unended).values(**ended))

    def change_schedule(self, **values: Any) -> None:
        """Write into the schedule rows by hand."""
        with self.db.writer() as session:
            session.execute(update(ScheduleRow).values(**values))


@pytest.fixture
def place(db: Database) -> Place:
    """The database at noon of 27 March 2026."""
    found = Place(db)
    found.set_clock(START)
    return found


@pytest.fixture
def sqlite_place(sqlite_db: Database) -> Place:
    """The same on SQLite alone, for what the kind of database doesn't change."""
    found = Place(sqlite_db)
    found.set_clock(START)
    return found


@pytest.fixture
def counted() -> Callable[[], dict[str, float]]:
    """Return what the meters have counted since the test began."""
    labels.forget()
    names = ("quantwatch_slots_missed_total", "quantwatch_slots_duplicate_prevented_total")

    def read() -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in meters.REGISTRY.collect():
            for sample in metric.samples:
                if sample.name in names:
                    name = sample.name.removeprefix("quantwatch_slots_").removesuffix("_total")
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    before = read()
    return lambda: {name: value - before.get(name, 0.0) for name, value in read().items()}
