"""Retention deletes what it said, nothing else, in short batches, between runs."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import insert, select, text, update

from quantwatch.config.service import RetentionConfig
from quantwatch.domain import RunStatus
from quantwatch.store import retention
from quantwatch.store.baselines import pin
from quantwatch.store.failed_tasks import list_failed, note_failure
from quantwatch.store.queue import NewRun, enqueue
from quantwatch.store.retention import plan, step
from quantwatch.store.runs import begin_run, get_result
from quantwatch.store.session import Database
from quantwatch.store.tables import (
    AlertRow,
    AuditRow,
    CheckRow,
    DeliveryRow,
    EpisodeRow,
    EventRow,
    RunAttemptRow,
    RunRow,
    ScheduleRow,
    SuiteRow,
    VocabularyRow,
)

Stored = Any


def test_every_tier_goes_in_its_time(db: Database, stored: Stored, config: RetentionConfig) -> None:
    """Catches a tier that stays forever, or goes with its neighbour."""
    ages = {0: "TPLR", 1: "TPLR", 2: "PLR", 9: "PLR", 11: "LR", 29: "LR", 300: "LR"}
    runs = {days: stored.add(days) for days in sorted(ages, reverse=True)}
    report = step(db, config, orphans=True)
    assert report.finished
    assert {days: stored.tiers(run) for days, run in runs.items()} == ages
    assert report.deleted == {"token matrices": 5 * 6, "prompt sums": 3}
    assert get_result(db, runs[300]).find("int8").find("logit_kl") is not None  # type: ignore[union-attr]
    assert stored.broken_references() == []


def test_old_statistics_are_thinned_to_one_run_a_week(
    db: Database, stored: Stored, config: RetentionConfig
) -> None:
    """Catches statistics that are averaged away, or all kept: old nights keep the whole model's."""
    runs = stored.nightly(range(40, 54))
    newest = stored.add(0)
    step(db, config)
    with_layers = [run for run in runs if "L" in stored.tiers(run)]
    assert len(with_layers) in (2, 3)
    for run in runs:
        rows = get_result(db, run).candidates[0].measurements
        assert [row.metric for row in rows][:1] == ["logit_kl"]
        assert len(rows) == (3 if run in with_layers else 1)
        floor = get_result(db, run).noise_floor
        assert ("lens_kl", "layers.0") in floor or run not in with_layers
        assert ("logit_kl", "model") in floor
    assert stored.tiers(newest) == "TPLR"


def test_what_is_protected_stays(db: Database, stored: Stored, config: RetentionConfig) -> None:
    """Catches a baseline, an open episode's run or a flagged run that is deleted (B-list, §6.6)."""
    pinned, first, kept, gone = (stored.add(days) for days in (2000, 1900, 1800, 1700))
    flagged = stored.add(15, flagged=True)
    baseline = stored.add(1650)
    compared = stored.add(5, baseline_run_id=baseline)
    stored.nightly(range(3))
    pin(db, "nightly", pinned)
    _open_episode(db, first)
    with db.writer() as session:
        until = datetime.now(UTC) + timedelta(days=1)
        session.execute(update(RunRow).where(RunRow.id == kept).values(kept_until=until))
    while not step(db, config).finished:
        pass
    assert [stored.tiers(run) for run in (pinned, first, kept)] == ["TPLR"] * 3
    assert stored.tiers(flagged) == "TPLR"
    assert (stored.tiers(compared), stored.tiers(baseline)) == ("PLR", "PLR")
    assert stored.tiers(gone) == ""


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_plan_says_exactly_what_goes(
    db: Database, stored: Stored, config: RetentionConfig, orphaned: bool
) -> None:
    """Catches a dry run that promises less, or more, than the real one does."""
    _old_and_new(db, stored, orphaned)
    before = stored.counts()
    planned = plan(db, config)
    assert stored.counts() == before
    done = step(db, config, orphans=True, budget_s=60)
    assert done.finished
    assert done.deleted == planned.deleted
    assert done.payload_bytes == planned.payload_bytes > 0
    assert ("orphans" in planned.deleted) == orphaned
    again = plan(db, config)
    assert (again.deleted, again.payload_bytes) == ({}, 0)


@pytest.mark.slow
def test_it_can_stop_after_any_batch(
    db: Database, stored: Stored, config: RetentionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches work that is lost or done twice when a step runs out of time in the middle."""
    _old_and_new(db, stored, orphaned=True)
    planned = plan(db, config)
    clock = _ClockThatBatchesMove(monkeypatch)
    total, steps = retention.Report(), 0
    while not total.finished:
        total += step(db, config, orphans=True, budget_s=1)
        assert stored.broken_references() == []
        steps += 1
        assert steps < 100
    assert steps > 5
    assert steps >= clock.num_batches
    assert total.deleted == planned.deleted


def _stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every batch take no time at all, however busy the machine is."""
    monkeypatch.setattr(retention, "time", SimpleNamespace(monotonic=lambda: 0.0))


class _ClockThatBatchesMove:
    """A monotonic clock on which every batch that deletes anything takes an hour."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_batches = 0
        self._real = retention._batch
        monkeypatch.setattr(retention, "time", self)
        monkeypatch.setattr(retention, "_batch", self._batch)

    def monotonic(self) -> float:
        return 3600.0 * self.num_batches

    def _batch(self, *arguments: Any) -> int | None:
        rows = self._real(*arguments)
        self.num_batches += bool(rows)
        return rows


def test_nothing_goes_while_a_run_is_measured(
    db: Database, stored: Stored, config: RetentionConfig
) -> None:
    """Catches deletion beside a measurement (B11): checks must not be disturbed."""
    old = stored.add(50)
    stored.nightly(range(3))
    begin_run(db, run_id="RUN", check="nightly", config={}, started_at=datetime.now(UTC))
    report = step(db, config)
    assert report.waiting == "run RUN is being measured"
    assert (report.deleted, report.finished, stored.tiers(old)) == ({}, False, "TPLR")
    with db.writer() as session:
        values = {"status": RunStatus.CANCELLED.value, "finished_at": datetime.now(UTC)}
        session.execute(update(RunRow).where(RunRow.id == "RUN").values(values))
    assert step(db, config).waiting is None
    assert stored.tiers(old) == "LR"


def test_a_run_that_begins_meanwhile_stops_it(
    db: Database, stored: Stored, config: RetentionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a window that is looked at only once, before the first batch."""
    stored.nightly(range(40, 45))
    _stop_the_clock(monkeypatch)
    real = retention._batch
    calls: list[int] = []

    def batch(*arguments: Any) -> int | None:
        if len(calls) == 2:
            begin_run(db, run_id="RUN", check="nightly", config={}, started_at=datetime.now(UTC))
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(retention, "_batch", batch)
    report = step(db, config)
    assert report.waiting == "run RUN is being measured"
    assert len(calls) == 3
    assert report.deleted["token matrices"] == 4 + 8


@pytest.mark.parametrize(
    ("minutes", "waits"),
    [(-10, False), (-1, True), (1, True), (10, False)],
    ids=["overdue and served by nobody", "due now", "due soon", "due later"],
)
def test_a_due_check_comes_first(
    db: Database, stored: Stored, config: RetentionConfig, minutes: int, waits: bool
) -> None:
    """Catches a batch right before a slot, and a stopped scheduler that blocks retention."""
    stored.add(50)
    at = datetime.now(UTC) + timedelta(minutes=minutes)
    _schedule(db, at)
    assert (step(db, config).waiting == "check nightly is due") == waits
    with db.writer() as session:
        session.execute(update(CheckRow).values(paused_at=at))
    assert step(db, config).waiting is None, "a paused check is not due"
    with db.writer() as session:
        new = NewRun("other", "m:1", {}, "/", "manual", not_before=at)
        enqueue(session, new)
    assert (step(db, config).waiting == "check other is due") == waits


def test_a_forgotten_run_does_not_stop_retention_for_ever(
    db: Database, stored: Stored, config: RetentionConfig
) -> None:
    """Catches a `check run` that was killed a month ago and seems to measure still."""
    old = stored.add(50)
    stored.nightly(range(3))
    ago = datetime.now(UTC) - timedelta(days=30)
    db.clock_shift = timedelta(days=-30)
    begin_run(db, run_id="RUN", check="nightly", config={}, started_at=ago)
    db.clock_shift = timedelta()
    report = step(db, config)
    assert stored.tiers(old) == "LR"
    assert report.waiting in (None, "run RUN has not ended"), "only names wait: it may still write"


def test_logs_go_and_open_stories_stay(
    db: Database, stored: Stored, config: RetentionConfig
) -> None:
    """Catches a message that is dropped before it was told, and a firing forgotten while open."""
    run = stored.add(0)
    opened = _open_episode(db, run, days=100)
    _event(db, "young", days=1, ended=True)
    _event(db, "told", days=90, ended=True)
    _event(db, "pending", days=120, ended=False)
    _event(db, "before the episode", days=110, ended=True)
    _attempt_and_audit(db, run, days=70)
    step(db, config)
    assert _events(db) == ["pending", "told", "young"]
    assert (stored.counts()["run_attempt"], stored.counts()["audit"]) == (1, 1)
    with db.writer() as session:
        values = {"resolved_at": datetime.now(UTC)}
        session.execute(update(EpisodeRow).where(EpisodeRow.id == opened).values(values))
    step(db, config)
    assert _events(db) == ["pending", "young"]
    assert stored.counts()["episode"] == 1
    assert stored.counts()["delivery"] == 2


def test_failed_tasks_are_forgotten_in_time(db: Database, config: RetentionConfig) -> None:
    """Catches a table of failures that only grows."""
    with db.writer() as session:
        note_failure(session, "deliver", "timeout", "ops", "no answer")
    assert step(db, config).deleted == {}
    db.clock_shift = timedelta(days=61)
    assert step(db, config).deleted == {"logs": 1}


def test_names_nobody_uses_go_last(db: Database, stored: Stored, config: RetentionConfig) -> None:
    """Catches suites (which hold people's text) and vocabularies that outlive all their runs."""
    stored.add(400, suite_name="secret", tokenizer="old")
    stored.add(0, suite_name="shipped", tokenizer="new")
    stored.add(1, suite_name="shipped", tokenizer="new")
    stored.add(2, suite_name="shipped", tokenizer="new")
    report = step(db, config)
    assert report.deleted["runs"] == 1
    with db.reader() as session:
        assert session.scalars(select(SuiteRow.name)).all() == ["shipped"]
        assert len(session.scalars(select(VocabularyRow.tokenizer_sha)).all()) == 1
        assert session.scalar(text("SELECT count(*) FROM suite_prompt")) == 3
        assert session.scalar(text("SELECT count(*) FROM variant")) == 2
    assert stored.broken_references() == []


def test_batches_adapt_to_the_time_they_take() -> None:
    """Catches one transaction that holds the only write lock for seconds (B11)."""
    size = 4
    for _ in range(20):
        size = retention.next_size(size, 0.001)
    assert size == retention.MAX_ROWS
    assert retention.next_size(1000, 0.1) == 1000
    assert retention.next_size(1000, 0.21) == 500
    assert retention.next_size(1, 5.0) == 1


def test_writers_get_in_between_two_batches(
    db: Database, stored: Stored, config: RetentionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches retention as one long transaction, which would hold the only write lock."""
    stored.nightly(range(40, 46))
    real = retention._batch

    def batch(*arguments: Any) -> int | None:
        with db.writer() as session:
            note_failure(session, "deliver", "timeout", "ops", "no answer")
        return real(*arguments)

    monkeypatch.setattr(retention, "_batch", batch)
    assert step(db, config).finished
    [task] = list_failed(db)
    assert task.attempts >= 5


def test_an_idle_step_writes_nothing(
    db: Database, stored: Stored, config: RetentionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a housekeeper that takes the write lock a dozen times an hour for nothing."""
    stored.add(0)
    monkeypatch.setattr(db, "writer", lambda: pytest.fail("nothing is to be written"))
    assert step(db, config, orphans=True).finished


def _old_and_new(db: Database, stored: Stored, orphaned: bool) -> None:
    """A bit of everything; `orphaned` runs used names of their own."""
    other = {"suite_name": "old", "tokenizer": "old"} if orphaned else {}
    stored.add(400, **other)
    stored.add(401, flagged=True, **other)
    stored.nightly(range(0, 60, 12))
    stored.nightly(range(3), check="second")
    _attempt_and_audit(db, stored.add(70), days=70)
    _event(db, "told", days=90, ended=True)


def _open_episode(db: Database, run: str, days: float = 1) -> str:
    with db.writer() as session:
        check = session.scalar(select(RunRow.check_id).where(RunRow.id == run))
        alert = AlertRow(check_id=check, candidate="int8", rule="open")
        session.add(alert)
        session.flush()
        values = {
            "id": "EPISODE", "alert_id": alert.id, "severity": "critical", "num_runs": 1,
            "opened_at": datetime.now(UTC) - timedelta(days=days), "first_run_id": run,
            "peak_kind": "finite", "evidence": {}, "told": [],
        }  # fmt: skip
        session.execute(insert(EpisodeRow).values(values))
    return "EPISODE"


def _event(db: Database, name: str, *, days: float, ended: bool) -> None:
    at = datetime.now(UTC) - timedelta(days=days)
    with db.writer() as session:
        event = {"id": name, "type": "test", "occurred_at": at, "subject": name, "seq": 0}
        session.execute(insert(EventRow).values(**event, body=b"{}"))
        delivery = {
            "event_id": name, "endpoint": "ops", "subject": name, "seq": 0, "attempt": 1,
            "state": "delivered" if ended else "retry_wait", "created_at": at, "next_at": at,
            "left_machine": True, "ended_at": at if ended else None,
        }  # fmt: skip
        session.execute(insert(DeliveryRow).values(delivery))


def _events(db: Database) -> list[str]:
    with db.reader() as session:
        return sorted(session.scalars(select(EventRow.id)))


def _attempt_and_audit(db: Database, run: str, days: float) -> None:
    at = datetime.now(UTC) - timedelta(days=days)
    with db.writer() as session:
        attempt = {"run_id": run, "number": 9, "worker": "w", "host": "h", "pid": 1}
        session.execute(insert(RunAttemptRow).values(**attempt, started_at=at, ended_at=at))
        audit = {"at": at, "actor": "me", "action": "check.pause", "subject": "nightly"}
        session.execute(insert(AuditRow).values(audit))
        # Who pinned the baseline is told as long as the run stays.
        session.execute(insert(AuditRow).values(audit | {"action": "baseline.pin"}))


def _schedule(db: Database, at: datetime) -> None:
    with db.writer() as session:
        check = session.scalar(select(CheckRow.id))
        row: dict[str, Any] = {
            "check_id": check,
            "settings": {},
            "settings_sha": "s",
            "anchor_at": at,
        }
        session.execute(insert(ScheduleRow).values(**row, next_slot_at=at, look_at=at))
