"""What people are shown of a running service, on both databases."""

from datetime import timedelta

from tests.monitor.store.test_kernel_cases import BATCH

from quantwatch.store import (
    applied,
    attempts,
    backlog,
    clock,
    leader,
    lookups,
    quarantine,
    schema,
    slots,
    timetables,
)
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, RunAttemptRow, RunRow

_ROW = {
    "status": "failed", "suite_name": "s", "num_tokens": 0, "num_prompts": 0, "capture_sha": "",
    "metrics_version": 1, "config": {}, "capture": {}, "timings_s": {}, "baseline_mismatch": [],
    "num_alerts": 0,
}  # fmt: skip


def test_nothing_yet(db: Database) -> None:
    """Catches an error where a database is new."""
    with db.reader() as session:
        assert leader.current(session) is None
        assert slots.held(session) == ()
        assert quarantine.quarantined(session) == ()
        assert backlog.lacking_by_state(session) == {}
        assert backlog.ended_by_state(session) == {}
        assert attempts.telemetry(session, 9) == ()
        assert applied.applied_checks(session) == {}
        assert timetables.planned(session) == ()
        assert applied.applied_settings(session) == {}
        assert schema.revision(session) == schema.REVISIONS[-1]


def test_who_leads(db: Database) -> None:
    """Catches a lease whose end is told by another clock than the database's."""
    leader.acquire(db, "a/scheduler")
    with db.reader() as session:
        found = leader.current(session)
    assert found is not None
    assert (found.holder, found.epoch) == ("a/scheduler", 1)
    assert timedelta(seconds=20) < found.left <= leader.TTL


def test_telemetry_of_the_newest_runs(db: Database) -> None:
    """Catches the attempts of old runs, and a GPU's record that is lost on the way."""
    kept = {"driver": "580", "gpus": {"GPU-1": {"name": "L4"}}}
    with db.writer() as session:
        check_id, now = lookups.check_id(session, "demo"), clock.now(session)
        for at in range(3):
            begin = now - timedelta(days=3 - at)
            session.add(RunRow(id=f"01{at}", check_id=check_id, slot_key=f"{at}",
                               started_at=begin, **_ROW))  # fmt: skip
            session.flush()
            session.add(RunAttemptRow(run_id=f"01{at}", number=1, worker="w", host="h", pid=1,
                                      started_at=begin, gpus=kept if at == 2 else None))  # fmt: skip
    with db.reader() as session:
        found = attempts.telemetry(session, 2)
    assert [(each.run_id, each.check, each.gpus) for each in found] == [
        ("012", "demo", kept),
        ("011", "demo", None),
    ]


def test_what_was_applied_and_who_is_set_apart(db: Database) -> None:
    """Catches a removed check among those in use, and a folder that is lost."""
    with db.writer() as session:
        applied.apply_checks(session, {"old": {"a": 1}}, "/etc/q")
        applied.apply_checks(session, {"new": {"b": 2}}, "/etc/q")
        applied.apply_settings(session, {"retention": {"logs": "9d"}})
        session.get_one(
            CheckRow, lookups.check_id(session, "old")
        ).quarantined_at = BATCH.started_at
    with db.reader() as session:
        [check] = applied.applied_checks(session).values()
        [(name, section)] = applied.applied_settings(session).items()
        apart = quarantine.quarantined(session)
    assert (check.check, check.config, check.folder) == ("new", {"b": 2}, "/etc/q")
    assert (name, section.document) == ("retention", {"logs": "9d"})
    assert apart == (("old", BATCH.started_at),)
