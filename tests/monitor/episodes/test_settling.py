"""Runs that end move alerts, once, and tell the right people, once."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from quantwatch.domain import Alert, RuleOutcome, RunStatus, Scope, Severity
from quantwatch.store import clock, evaluations, outbox, runs
from quantwatch.store.tables import CheckRow, EpisodeRow, EventRow, RuleEvaluationRow, RunRow

Say = Callable[..., RuleOutcome]
Service = Any
FIRST, RESOLVED = ("alert.firing", "first"), ("alert.resolved", "resolved_all")


def test_one_episode_from_breach_to_recovery(service: Service, say: Say) -> None:
    """Catches a message per run, a lost resolve, and an episode without its figures."""
    first = service.run(say("breach"))
    last = service.run(say("breach", value=0.3))
    assert service.state() == "firing"
    service.run(say("clear"))
    assert service.state() == "recovering"
    service.run(say("clear", value=0.02))
    assert service.state() == "inactive"
    assert service.heard() == [FIRST, RESOLVED] == service.heard("pager")
    opened, resolved = service.bodies()
    assert opened["data"]["alerts"][0]["first_run"] == first
    [member] = resolved["data"]["alerts"]
    assert (member["peak"], member["resolved_value"], member["num_runs"]) == (0.3, 0.02, 4)
    assert (member["resolve_reason"], member["value"]) == ("recovered", 0.3)
    assert resolved["data"]["duration_s"] == member["duration_s"] == pytest.approx(180, abs=5)
    assert resolved["data"]["run"] not in (first, last)


def test_the_first_message_says_everything(service: Service, say: Say) -> None:
    """Catches an alert from which nobody learns what, how bad, where, since when, and why (X23)."""
    run_id = service.run(say("breach"))
    [body] = service.bodies()
    data = body["data"]
    assert body["type"] == "alert.firing"
    assert body["timestamp"].endswith("Z")
    assert (data["version"], data["severity"]) == (1, "critical")
    assert (data["check"], data["candidate"], data["run"]) == ("nightly", "int8", run_id)
    assert data["title"] == (
        "nightly / int8: critical, firing: layer-kl: Output KL 0.2 at model is above the limit 0.1"
    )
    assert data["culprit"] == "layers.3 stands out"
    assert data["changed"][0]["part"] == "driver"
    assert data["drift"] == "changed since the baseline: gpus.0.driver 570.2 → 575.1"
    assert data["link"] == f"https://watch.example/run?run={run_id}"
    assert data["command"] == "quantwatch check run nightly"
    [scope] = data["scopes"]
    assert (scope["scope"], scope["value"], scope["threshold"]) == ("model", 0.2, 0.1)


def test_two_hundred_layers_and_ten_rules_are_one_message(
    service: Service, say: Say, make_alert: Callable[[RuleOutcome], Alert]
) -> None:
    """Catches a page per layer (X16): ten rules and the worst ten scopes named, the rest counted."""
    told = [say("breach", f"rule-{n}") for n in range(12)]
    scopes = tuple(
        replace(make_alert(one), scope=Scope(f"layers.{n}"), value=0.2 + n / 1000)
        for one in told
        for n in range(20)
    )
    service.run(*told, alerts=scopes)
    [body] = service.bodies()
    data = body["data"]
    assert (len(data["alerts"]), data["more_alerts"], data["open_alerts"]) == (10, 2, 12)
    assert (len(data["scopes"]), data["more_scopes"]) == (10, 230)
    assert {scope["scope"] for scope in data["scopes"]} == {"layers.19"}
    service.run(*(say("clear", f"rule-{n}", leave_runs=1) for n in range(12)))
    assert service.heard() == [FIRST, RESOLVED]


def test_each_candidate_is_a_group_of_its_own(service: Service, say: Say) -> None:
    """Catches a resolve that names another candidate's alert."""
    service.run(say("breach"), say("breach", candidate="int4"))
    assert [body["data"]["candidate"] for body in service.bodies()] == ["int8", "int4"]
    assert service.heard() == [FIRST, FIRST]


def test_members_come_and_go(service: Service, say: Say) -> None:
    """Catches a group that is closed while one of it fires."""
    a, b = "layer-kl", "top1"
    service.run(say("breach", a), say("clear", b))
    service.run(say("breach", a), say("breach", b))
    service.run(say("clear", a, leave_runs=1), say("breach", b))
    service.run(say("clear", a), say("clear", b, leave_runs=1))
    assert service.heard() == [
        FIRST,
        ("alert.firing", "new_members"),
        ("alert.updated", "resolved_some"),
        RESOLVED,
    ]
    assert [body["data"]["open_alerts"] for body in service.bodies()] == [1, 2, 1, 0]


def test_who_was_not_told_hears_no_resolve(service: Service, say: Say) -> None:
    """Catches a resolve of something that the receiver never heard of (X17)."""
    service.run(say("breach", severity=Severity.WARNING))
    service.run(say("clear", leave_runs=1))
    assert (service.heard(), service.heard("pager")) == ([FIRST, RESOLVED], [])


def test_a_receiver_that_left_the_check_still_hears_the_end(service: Service, say: Say) -> None:
    """Catches an incident that stays open because the configuration was edited."""
    service.run(say("breach"))
    service.alerting = {"confirm": False, "endpoints": ["pager"]}
    service.run(say("clear", leave_runs=1))
    assert service.heard() == [FIRST, RESOLVED]


def test_rising_severity_escalates_once(service: Service, say: Say) -> None:
    """Catches a warning that becomes critical in silence, and a message when it falls."""
    warning = {"severity": Severity.WARNING}
    service.run(say("breach", **warning))
    service.run(say("breach"))
    service.run(say("breach", **warning))
    service.run(say("breach"))
    escalated = ("alert.escalated", "escalated")
    assert (service.heard(), service.heard("pager")) == ([FIRST, escalated], [escalated])


def test_a_second_settlement_changes_nothing(service: Service, say: Say) -> None:
    """Catches a run that counts twice: each rule is judged on a run once."""
    from quantwatch.pipeline.alerting import settle

    run_id = service.run(say("breach", enter_runs=2))
    result = service.result(run_id, say("breach", enter_runs=2))
    with service.db.writer() as session:
        settle(session, result, service.settings, service.config)
    assert (service.state(), service.alert().num_breaches, service.heard()) == ("pending", 1, [])


def test_an_edited_rule_closes_and_begins_anew(service: Service, say: Say) -> None:
    """Catches an alert that goes on under another threshold (X21); the end is told first."""
    service.run(say("breach"))
    before = service.alert().episode_id
    service.run(say("breach", rule_sha="v2"))
    assert service.heard() == [FIRST, RESOLVED, FIRST]
    assert service.bodies()[1]["data"]["alerts"][0]["resolve_reason"] == "rule_changed"
    assert service.alert().episode_id not in (None, before)


def test_a_deleted_rule_and_candidate_are_closed(service: Service, say: Say) -> None:
    """Catches an alert that nothing can ever resolve (X21)."""
    service.run(say("breach", "mine"), say("clear", "other"), say("breach", candidate="int4"))
    one = {"candidates": [{"name": "int8", "model": "smollm2-135m"}]}
    service.check = one
    service.run(say("clear", "other"))
    reasons = [one["data"]["alerts"][0]["resolve_reason"] for one in service.bodies()[2:]]
    assert (service.heard()[2:], reasons) == ([RESOLVED, RESOLVED], ["rule_deleted"] * 2)


def test_a_candidate_of_which_a_run_says_nothing_keeps_its_alerts(
    service: Service, say: Say
) -> None:
    """Catches a run without outcomes that resolves a regression (X9)."""
    service.run(say("breach"))
    for _ in range(3):
        service.run(say("clear", candidate="int4"))
    assert (service.state(), service.heard()) == ("firing", [FIRST])


def test_a_series_that_vanished_is_closed(service: Service, say: Say) -> None:
    """Catches an alert on a layer that the model doesn't have any more."""
    service.run(say("breach"))
    service.run(say("missing"))
    assert service.state() == "firing"
    service.run(say("missing"))
    assert service.bodies()[1]["data"]["alerts"][0]["resolve_reason"] == "series_missing"


def test_another_pinned_baseline_begins_anew(service: Service, say: Say) -> None:
    """Catches an episode whose figures are against two baselines."""
    service.run(say("breach", "baseline-kl"), baseline_run_id="old")
    service.run(say("breach", "baseline-kl"), baseline_run_id="old")
    service.run(say("breach", "baseline-kl"), baseline_run_id="new")
    assert service.heard() == [FIRST, RESOLVED, FIRST]
    assert service.bodies()[1]["data"]["alerts"][0]["resolve_reason"] == "baseline_moved"
    assert service.bodies()[2]["data"]["baseline"] == "new"


def test_a_rolling_baseline_moves_every_night(service: Service, say: Say) -> None:
    """Catches a rolling baseline that closes its alert each night."""
    service.check = {"baseline": {"kind": "rolling"}}
    service.run(say("breach", "baseline-kl"), baseline_run_id="old")
    service.run(say("breach", "baseline-kl"), baseline_run_id="new")
    assert service.heard() == [FIRST]


def test_counters_survive_a_restart(service: Service, say: Say) -> None:
    """Catches pending counters that live in memory (B20): each run has its own connections."""
    from quantwatch.store.session import open_database

    three = {"enter_runs": 3}
    for _ in range(2):
        service.run(say("breach", **three))
        shift = service.db.clock_shift
        service.db.close()
        service.db = open_database(service.db.url)
        service.db.clock_shift = shift
    assert (service.state(), service.heard()) == ("pending", [])
    service.run(say("breach", **three))
    assert (service.state(), service.heard()) == ("firing", [FIRST])
    service.db.close()


def test_oscillation_is_one_firing_and_one_resolved(service: Service, say: Say) -> None:
    """Catches a flapping alert, through the whole chain (B18)."""
    for what in ("breach", "between", "breach", "clear", "between", "breach", "clear", "clear"):
        service.run(say(what))
    assert service.heard() == [FIRST, RESOLVED]


def test_who_fires_again_and_again_has_to_stay_away_longer(service: Service, say: Say) -> None:
    """Catches a flap that nobody sees, and one that is told as often as before (X22)."""
    for _ in range(5):
        service.run(say("breach"))
        service.run(say("clear", leave_runs=1))
    service.run(say("breach"))
    assert service.bodies()[-1]["data"]["alerts"][0]["flapping"] is True
    service.run(say("clear", leave_runs=1))
    assert service.state() == "recovering"
    service.run(say("clear", leave_runs=1))
    assert service.state() == "inactive"
    assert [body["data"]["alerts"][0]["flapping"] for body in service.bodies()[:8]] == [False] * 8


def test_a_run_that_failed_moves_nothing(service: Service, say: Say) -> None:
    """Catches trouble of the monitor itself that looks like a regression, or like its end (B09)."""
    service.run(say("breach"))
    run_id = service.queue()
    with service.db.reader() as session:
        before = session.scalar(select(func.count()).select_from(RuleEvaluationRow))
    failed = {"status": RunStatus.FAILED, "verdict": None, "reason": "database is locked"}
    service.finish(service.result(run_id, say("clear"), **failed))
    with service.db.reader() as session:
        assert session.scalar(select(func.count()).select_from(RuleEvaluationRow)) == before
    assert (service.state(), service.heard()) == ("firing", [FIRST])


def health(service: Service) -> Any:
    """The last success, the failed runs in a row, and what the database's clock says."""
    with service.db.reader() as session:
        row = session.execute(select(CheckRow.last_success_at, CheckRow.unhealthy_runs)).one()
        return (*row, clock.now(session))


def test_a_success_is_noted_for_the_dead_man(service: Service, say: Say) -> None:
    """Catches a check that lives and is called dead."""
    service.change_check(unhealthy_runs=3)
    service.run(say("clear"))
    last, unhealthy, _ = health(service)
    assert last is not None
    assert unhealthy == 0


FAR = datetime(2036, 1, 1, tzinfo=UTC)


def test_a_success_of_a_host_in_the_future_was_now(service: Service, say: Say) -> None:
    """Catches a worker whose clock is ten years ahead, and a dead-man alert that is blind for ten
    years; later successes count, too."""
    service.run(say("clear"), finished_at=FAR)
    first, _, now = health(service)
    assert first <= now
    service.change_check(unhealthy_runs=3)
    service.run(say("clear"))
    second, unhealthy, _ = health(service)
    assert first < second < FAR
    assert unhealthy == 0


def test_a_success_that_was_stored_in_the_future_is_replaced(service: Service, say: Say) -> None:
    """Catches a check that no success makes well again: an older version stored 2036."""
    service.change_check(unhealthy_runs=3, last_success_at=FAR)
    service.run(say("clear"))
    last, unhealthy, now = health(service)
    assert last <= now
    assert unhealthy == 0


def test_an_old_result_is_no_sign_of_health(service: Service, say: Say) -> None:
    """Catches an import of last year's run that takes back the newest success."""
    service.run(say("clear"))
    known = health(service)[0]
    service.change_check(unhealthy_runs=3)
    service.run(say("clear"), finished_at=datetime(2025, 1, 1, tzinfo=UTC))
    assert health(service)[:2] == (known, 3)


def test_evaluations_are_kept(service: Service, say: Say) -> None:
    """Catches a history that can't say why an alert fired."""
    service.run(say("breach"))
    service.run(say("between"))
    service.run(say("undecided"))
    with service.db.reader() as session:
        found = evaluations.list_evaluations(session, service.alert().id)
    assert [(one.outcome, one.value, one.threshold) for one in found] == [
        ("undecided", None, 0.1),
        ("between", 0.09, 0.1),
        ("breach", 0.2, 0.1),
    ]


def test_a_crash_leaves_neither_state_nor_message(
    service: Service, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a state change whose message is lost (K7): both or neither, with the results."""
    result = service.result(service.queue(), say("breach"))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "publish", crash)
        with pytest.raises(KeyboardInterrupt):
            service.finish(result)
    with service.db.reader() as session:
        for table in (EpisodeRow, EventRow, RuleEvaluationRow):
            assert session.scalar(select(func.count()).select_from(table)) == 0
        assert session.scalar(select(RunRow.status)) == "queued"
    service.finish(result)
    assert (service.state(), service.heard()) == ("firing", [FIRST])


def test_without_receivers_an_alert_still_fires(service: Service, say: Say) -> None:
    """Catches a service without endpoints that sees nothing."""
    service.endpoints = {}
    service.run(say("breach"))
    assert service.state() == "firing"
    assert service.watch() == 0
    service.run(say("clear", leave_runs=1))
    with service.db.reader() as session:
        assert session.scalar(select(func.count()).select_from(EventRow)) == 0
    assert (
        runs.get_result(service.db, service.alert().episode_id or service.run()).check == "nightly"
    )


CONFIRM = {"confirm": True}


def test_a_critical_breach_is_confirmed_first(service: Service, say: Say) -> None:
    """Catches a page on one bad measurement; the same run is queued once more, at once."""
    service.alerting = CONFIRM
    parent = service.run(say("breach"), say("breach", "second"))
    assert (service.state(), service.heard()) == ("pending", [])
    assert service.confirmation(parent) is not None
    confirming = service.confirm(parent, say("breach"), say("clear", "second"))
    assert (service.state(), service.state("second")) == ("firing", "inactive")
    [body] = service.bodies()
    [member] = body["data"]["alerts"]
    assert (member["rule"], member["first_run"]) == ("layer-kl", parent)
    assert member["confirmation"] == f"confirmed by run {confirming}"
    assert service.confirmation(confirming) is None


def test_a_warning_is_told_at_once(service: Service, say: Say) -> None:
    """Catches a confirmation run for what wakes nobody."""
    service.alerting = CONFIRM
    run_id = service.run(say("breach", severity=Severity.WARNING))
    assert (service.heard(), service.confirmation(run_id)) == ([FIRST], None)


def test_a_confirmation_run_counts_for_nobody_else(service: Service, say: Say) -> None:
    """Catches a night that counts twice towards entering or leaving."""
    service.alerting = CONFIRM
    two = say("breach", "two", enter_runs=2)
    parent = service.run(say("breach"), two)
    service.confirm(parent, say("breach"), two)
    assert (service.state(), service.state("two")) == ("firing", "pending")


@pytest.mark.parametrize("status", ["failed", "timed_out", "abandoned", "cancelled"])
def test_a_confirmation_that_failed_does_not_lose_the_alert(
    service: Service, say: Say, status: str
) -> None:
    """Catches a regression that waits forever for a run that ran out of memory."""
    service.alerting = CONFIRM
    parent = service.run(say("breach"))
    assert service.watch() == 0
    service.end(service.confirmation(parent), status)
    assert service.watch() == 1
    [body] = service.bodies()
    words = body["data"]["alerts"][0]["confirmation"]
    assert words == f"not confirmed: the confirmation run is {status}"
    assert (service.state(), service.watch()) == ("firing", 0)


def test_a_confirmation_that_nobody_runs_is_not_waited_for_forever(
    service: Service, say: Say
) -> None:
    """Catches a regression that a quarantined check, or a service without workers, swallows."""
    service.alerting = CONFIRM
    service.run(say("breach"), say("clear", candidate="int4"))
    assert [service.watch(timedelta(hours=h)) for h in (5, 2)] == [0, 1]
    [member] = service.bodies()[0]["data"]["alerts"]
    assert member["confirmation"] == "not confirmed: no confirmation run has ended within 6h"


def test_a_confirmation_that_could_not_measure_it_fires(service: Service, say: Say) -> None:
    """Catches a candidate that fails to load in the confirmation, and with it the alert."""
    service.alerting = CONFIRM
    parent = service.run(say("breach"))
    service.confirm(parent, say("clear", candidate="int4"))
    assert (service.state(), service.watch(), service.state()) == ("pending", 1, "firing")


LOST = {"words": "prompt 3: values in only one of the runs, nothing is concluded"}


def test_a_confirmation_that_lost_a_prompt_fires(service: Service, say: Say) -> None:
    """Catches a regression that one lost prompt of the confirmation run drops as recovered."""
    service.alerting = CONFIRM
    parent = service.run(say("breach", may_be_chance=True))
    service.confirm(parent, say("undecided", may_be_chance=True, **LOST))
    assert (service.state(), service.heard()) == ("pending", [])
    assert (service.watch(), service.watch(), service.state()) == (1, 0, "firing")
    [member] = service.bodies()[0]["data"]["alerts"]
    assert member["confirmation"] == (
        "not confirmed: nothing can be told from the confirmation run"
    )


def test_a_confirmation_whose_test_denies_tells_nobody(service: Service, say: Say) -> None:
    """Catches a chance finding that pages: all was measured, and the test did not establish it."""
    service.alerting = CONFIRM
    parent = service.run(say("breach", may_be_chance=True))
    service.confirm(parent, say("undecided", may_be_chance=True, was_tested=True))
    assert (service.state(), service.watch(), service.heard()) == ("inactive", 0, [])


@pytest.mark.parametrize(
    "rule",
    [{}, {"may_be_chance": True}, {"may_be_chance": True, "was_tested": True}],
    ids=["absolute", "baseline, a prompt lost", "baseline, tested and not established"],
)
def test_nights_that_can_not_tell_neither_count_nor_reset(
    service: Service, say: Say, rule: dict[str, Any]
) -> None:
    """Catches a lost prompt that starts a count anew, and one that ends a recovery (B19)."""
    two = {"enter_runs": 2, "may_be_chance": bool(rule)}
    for what in ("breach", "undecided", "undecided"):
        service.run(say(what, **two | (rule if what == "undecided" else {})))
        assert (service.state(), service.alert().num_breaches) == ("pending", 1)
    for what in ("breach", "clear", "undecided", "clear"):
        service.run(say(what, **two | (rule if what == "undecided" else {})))
    assert service.heard() == [FIRST, RESOLVED]


def test_two_of_five_nights(service: Service, say: Say) -> None:
    """Catches a window that is lost between runs, or in which a night that can't tell takes part.

    Told once, though it never breaches twice in a row; the next episode counts anew.
    """
    fields = {"enter_runs": 2, "enter_window": 3, "leave_runs": 1}
    for what in ("breach", "clear", "undecided", "clear", "clear"):
        service.run(say(what, **fields))
    assert (service.state(), service.heard()) == ("inactive", [])
    for what in ("breach", "clear", "undecided"):
        service.run(say(what, **fields))
    assert (service.state(), service.alert().breach_window) == ("pending", 0b10)
    service.run(say("breach", **fields))
    assert (service.state(), service.heard()) == ("firing", [FIRST])
    service.run(say("clear", **fields))
    service.run(say("breach", **fields))
    assert (service.state(), service.heard()) == ("pending", [FIRST, RESOLVED])


def test_the_next_night_confirms_when_no_worker_did(service: Service, say: Say) -> None:
    """Catches an alert that waits for a queue that nobody works on."""
    service.alerting = CONFIRM
    parent = service.run(say("breach"))
    service.run(say("breach"))
    assert service.heard() == [FIRST]
    service.confirm(parent, say("clear"))
    assert (service.state(), service.heard()) == ("firing", [FIRST])


def test_hours_are_counted_from_the_first_breach(service: Service, say: Say) -> None:
    """Catches a duration that begins with the message instead of the measurement."""
    two, began = {"enter_runs": 2}, time.monotonic()
    service.run(say("breach", **two))
    service.db.clock_shift += timedelta(days=1)
    service.run(say("breach", **two))
    service.run(say("clear", leave_runs=1))
    more = service.bodies()[-1]["data"]["duration_s"] - timedelta(days=1, minutes=2).total_seconds()
    assert -0.01 <= more <= time.monotonic() - began  # a busy machine takes its time
