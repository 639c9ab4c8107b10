"""What happens between runs: silences, maintenance, reminders, dead-man, health, deleted rules."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from quantwatch.domain import RuleOutcome, Severity
from quantwatch.errors import QuantwatchError, UserError
from quantwatch.pipeline.alerting import close_alert, note_trouble
from quantwatch.store import clock, episodes, lookups, silences
from quantwatch.store.queue import slot_key
from quantwatch.store.tables import CheckRow, ScheduleRow

Say = Callable[..., RuleOutcome]
Service = Any
FIRST, RESOLVED = ("alert.firing", "first"), ("alert.resolved", "resolved_all")
EXPIRED, REMINDER = ("alert.firing", "silence_expired"), ("alert.reminder", "reminder")
HOUR = timedelta(hours=1)


def silence(service: Service, length: timedelta = HOUR, **matcher: str) -> int:
    with service.db.writer() as session:
        made = silences.add_silence(session, matcher or {"check": "*"}, length, "me@host", "known")
    return made.id


def test_silenced_from_beginning_to_end_is_told_to_nobody(service: Service, say: Say) -> None:
    """Catches a resolve of what was silenced (X17, X19); evaluation goes on all the same."""
    silence(service)
    service.run(say("breach"))
    assert (service.state(), service.watch()) == ("firing", 0)
    service.run(say("clear", leave_runs=1))
    assert (service.state(), service.watch(2 * HOUR), service.heard()) == ("inactive", 0, [])


def test_what_still_fires_when_the_silence_ends_is_told(service: Service, say: Say) -> None:
    """Catches an alert that a forgotten silence swallowed; then its end is told, too."""
    silence(service)
    service.run(say("breach"))
    assert [service.watch(), service.watch(2 * HOUR), service.watch()] == [0, 1, 0]
    service.run(say("clear", leave_runs=1))
    assert service.heard() == [EXPIRED, RESOLVED]


def test_a_silence_over_something_told(service: Service, say: Say) -> None:
    """Catches a recovery that a silence keeps from those who wait for it."""
    service.run(say("breach"))
    silence(service, rule="layer-*")
    service.watch()
    service.watch(2 * HOUR)
    assert service.heard() == [FIRST, EXPIRED]
    silence(service)
    service.run(say("clear", leave_runs=1))
    assert service.heard() == [FIRST, EXPIRED, RESOLVED]


def test_a_lifted_silence_ends_at_once(service: Service, say: Say) -> None:
    """Catches an unsilence that has to wait for the end it was given."""
    number = silence(service)
    service.run(say("breach"))
    with service.db.writer() as session:
        silences.lift_silence(session, number, "me@host")
    service.watch()
    assert service.heard() == [EXPIRED]
    with (
        service.db.writer() as session,
        pytest.raises(UserError, match=f"no silence {number} holds"),
    ):
        silences.lift_silence(session, number, "me@host")


def test_a_silence_of_warnings_does_not_swallow_an_escalation(service: Service, say: Say) -> None:
    """Catches a critical alert that nobody hears of because it began as a warning."""
    silence(service, severity="warning")
    service.run(say("breach", severity=Severity.WARNING))
    assert service.heard() == []
    service.run(say("breach"))
    assert service.heard() == [("alert.escalated", "escalated")]


def test_a_silence_names_what_it_mutes(service: Service, say: Say) -> None:
    """Catches a silence of one candidate that mutes another."""
    silence(service, candidate="int4")
    service.run(say("breach"), say("breach", candidate="int4"))
    assert [body["data"]["candidate"] for body in service.bodies()] == ["int8"]


def window(service: Service, *, inside: bool) -> None:
    """Configure a maintenance window of an hour that begins a minute ago, or tomorrow."""
    with service.db.reader() as session:
        begin = clock.now(session) + (timedelta(minutes=-1) if inside else timedelta(hours=20))
    cron = f"{begin.minute} {begin.hour} * * *"
    service.alerting = {"confirm": False, "maintenance": [{"cron": cron, "length": "1h"}]}


def test_down_maintenance_up_still_sends_the_recovery(service: Service, say: Say) -> None:
    """Catches an incident that stays open after a maintenance window (B33)."""
    service.run(say("breach"))
    window(service, inside=True)
    service.watch()
    service.run(say("clear", leave_runs=1))
    assert service.heard() == [FIRST, RESOLVED]


def test_maintenance_keeps_and_tells_afterwards(service: Service, say: Say) -> None:
    """Catches an alert that began in a window and is never told."""
    window(service, inside=True)
    service.run(say("breach"))
    assert (service.state(), service.watch(), service.heard()) == ("firing", 0, [])
    service.watch(2 * HOUR)
    assert service.heard() == [EXPIRED]


def test_reminders_end_with_an_acknowledgement(service: Service, say: Say) -> None:
    """Catches a reminder per minute, and one that goes on although somebody looks after it."""
    service.alerting = {"confirm": False, "reminder": "12h"}
    service.run(say("breach"), say("breach", "top1-agreement"))
    assert [service.watch(11 * HOUR), service.watch(2 * HOUR), service.watch(HOUR)] == [0, 1, 0]
    assert service.heard() == [FIRST, REMINDER]
    assert len(service.bodies()[1]["data"]["alerts"]) == 2
    for rule in ("layer-kl", "top1-agreement"):
        with service.db.writer() as session:
            episodes.acknowledge(session, service.alert(rule).id, "me@host", "looking")
    assert service.watch(20 * HOUR) == 0
    assert service.alert().episode.acked_by == "me@host"
    service.run(say("clear", leave_runs=1), say("clear", "top1-agreement", leave_runs=1))
    assert service.heard() == [FIRST, REMINDER, RESOLVED]


def test_a_reminder_more_often_than_twice_a_day_is_refused(service: Service) -> None:
    """Catches an alert that teaches people to look away."""
    service.alerting = {"reminder": "1h"}
    with pytest.raises(ValueError, match="too often; allowed: 12h or more"):
        _ = service.settings


def test_an_unhealthy_check_reminds_only_of_that(service: Service, say: Say) -> None:
    """Catches a metric alert that is repeated from old figures while nothing is measured."""
    service.alerting = {"confirm": False, "reminder": "12h"}
    service.check = {"schedule": None}
    service.run(say("breach"))
    service.change_check(unhealthy_runs=2)
    service.watch()
    service.watch(13 * HOUR)
    told = [(body["data"]["candidate"], body["data"]["reason"]) for body in service.bodies()]
    assert told == [("int8", "first"), (None, "first"), (None, "reminder")]
    assert service.state() == "firing"


def test_failed_runs_are_a_health_alert_and_nothing_else(service: Service, say: Say) -> None:
    """Catches an infrastructure trouble that becomes a regression, and one bad night that pages."""
    service.change_check(unhealthy_runs=1)
    assert service.watch() == 0
    service.end(service.queue(), "failed")
    service.change_check(unhealthy_runs=2)
    assert (service.watch(), service.watch()) == (1, 0)
    [body] = service.bodies()
    [member] = body["data"]["alerts"]
    assert (member["rule"], body["data"]["severity"]) == ("health", "warning")
    assert "2 runs in a row failed" in member["words"]
    assert "(oom): out of memory" in member["words"]
    assert body["data"]["link"] == "https://watch.example/alerts"
    assert service.heard("pager") == []
    service.run(say("clear"))
    assert service.heard() == [FIRST, RESOLVED]


def test_trouble_can_be_told_in_the_transaction_that_ends_a_run(service: Service) -> None:
    """Catches a health alert that waits for the next minute although somebody asked."""
    service.change_check(unhealthy_runs=2)
    with service.db.writer() as session:
        note_trouble(session, "nightly", service.settings, service.config)
    assert service.heard() == [FIRST]


def test_a_quarantined_check_is_unhealthy(service: Service) -> None:
    """Catches a check that is never run again and nobody hears of it."""
    service.change_check(quarantined_at=datetime(2026, 11, 29, tzinfo=UTC))
    service.watch()
    assert "in quarantine" in service.bodies()[0]["data"]["title"]


def slot(service: Service, hours_ago: float, status: str, reason: str | None = None) -> datetime:
    """Record a slot as the scheduler would have."""
    with service.db.reader() as session:
        instant = (clock.now(session) - hours_ago * HOUR).replace(microsecond=0)
    run_id = service.queue(slot_key=slot_key(instant), trigger="schedule", scheduled_for=instant)
    service.end(run_id, status)
    if reason is not None:
        from quantwatch.store.tables import RunRow

        with service.db.writer() as session:
            session.execute(update(RunRow).where(RunRow.id == run_id).values(reason_code=reason))
    return instant


def test_no_success_in_time_is_a_dead_man_alert(service: Service, say: Say) -> None:
    """Catches the night that nobody notices is missing (X8)."""
    instant = slot(service, 5.5, "failed")
    assert service.watch() == 0
    assert (service.watch(HOUR), service.watch()) == (1, 0)
    [body] = service.bodies("pager")
    assert body["data"]["alerts"][0]["rule"] == "dead-man"
    assert f"{instant:%Y-%m-%d %H:%M} UTC" in body["data"]["title"]
    service.run(say("clear"))
    assert service.heard("pager") == [FIRST, RESOLVED]


def test_a_success_in_the_future_does_not_blind_the_dead_man(service: Service) -> None:
    """Catches a check that dies unseen because a host in 2036 once reported a success."""
    service.change_check(last_success_at=datetime(2036, 1, 1, tzinfo=UTC))
    slot(service, 7, "failed")
    assert service.watch() == 1
    assert "last success: never" in service.bodies("pager")[0]["data"]["alerts"][0]["words"]


def test_a_scheduler_that_stands_still_is_noticed(service: Service) -> None:
    """Catches a dead scheduler: no slot is recorded, and the next one stays in the past."""
    with service.db.writer() as session:
        moment = clock.now(session)
        row = ScheduleRow(
            check_id=lookups.check_id(session, "nightly"), settings={}, settings_sha="",
            anchor_at=moment - 48 * HOUR, next_slot_at=moment - 7 * HOUR, look_at=moment,
        )  # fmt: skip
        session.add(row)
    assert service.watch() == 1
    assert service.heard() == [FIRST]


@pytest.mark.parametrize("reason", ["paused", "maintenance"])
def test_slots_of_a_pause_are_nobodys_loss(service: Service, reason: str) -> None:
    """Catches a dead-man alert right after a check is resumed."""
    slot(service, 7, "skipped", reason)
    assert service.watch() == 0


def test_missed_slots_are_a_loss(service: Service) -> None:
    """Catches a night that was skipped because nobody was there to start it."""
    slot(service, 7, "skipped", "missed")
    assert service.watch() == 1


def test_a_paused_check_has_no_dead_man(service: Service) -> None:
    """Catches an alert on what somebody stopped on purpose."""
    slot(service, 7, "failed")
    service.change_check(paused_at=datetime(2026, 11, 29, tzinfo=UTC))
    assert service.watch() == 0


def test_a_check_without_a_schedule_has_no_dead_man(service: Service) -> None:
    """Catches an alert that stays open when the schedule is taken out."""
    slot(service, 7, "failed")
    service.watch()
    service.check = {"schedule": None}
    service.watch()
    assert service.heard() == [FIRST, RESOLVED]
    assert service.bodies()[1]["data"]["alerts"][0]["resolve_reason"] == "rule_deleted"


@pytest.mark.slow
def test_a_rule_that_is_switched_off_is_closed_without_a_run(service: Service, say: Say) -> None:
    """Catches an alert that waits for the next night to be closed (X21)."""
    service.run(say("breach"), say("breach", "top1-agreement"))
    service.check = {"rules": [{"name": "layer-kl", "enabled": False}]}
    service.watch()
    assert (service.state(), service.state("top1-agreement")) == ("inactive", "firing")
    assert service.heard()[1:] == [("alert.updated", "resolved_some")]


def test_a_removed_check_closes_its_alerts(service: Service, say: Say) -> None:
    """Catches an incident of a check that nobody runs any more."""
    service.run(say("breach"))
    service.change_check(removed_at=datetime(2026, 11, 29, tzinfo=UTC))
    service.watch()
    assert service.heard() == [FIRST, RESOLVED]


def test_closed_by_hand(service: Service, say: Say) -> None:
    """Catches a close that nobody is told of, or that happens twice."""
    service.run(say("breach"))
    number = service.alert().id
    close_alert(service.db, number, "me@host", "as expected", service.config)
    assert service.heard() == [FIRST, RESOLVED]
    assert service.bodies()[1]["data"]["alerts"][0]["resolve_reason"] == "manual"
    with pytest.raises(UserError, match="is inactive; there is nothing to close"):
        close_alert(service.db, number, "me@host", "again", service.config)
    service.run(say("breach"))
    assert service.heard()[2:] == [FIRST]


def test_one_broken_check_does_not_keep_others_from_being_watched(
    service: Service, say: Say
) -> None:
    """Catches a watch that stops at the first check it can't read."""
    service.change_check(unhealthy_runs=2)
    with service.db.writer() as session:
        broken = {"name": "a-broken", "config": {"suite": 7}, "applied_at": clock.now(session)}
        session.add(CheckRow(**broken))
    with pytest.raises(QuantwatchError, match="check a-broken, as it was applied, is not valid"):
        service.watch()
    assert service.heard() == [FIRST]
