"""A run under way, and what its worker is known to do: one set of words on every page."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from quantwatch.domain import RunStatus
from quantwatch.store.states import UnendedRun
from quantwatch.store.timetables import Planned, Timetable
from quantwatch_dashboard import text
from quantwatch_dashboard.components import live, progress, run_attempts, schedule, service

NOW = datetime(2026, 11, 30, 1, tzinfo=UTC)


def run(heard: float | None = 4, lease: float | None = 50, **values: Any) -> UnendedRun:
    """Return a run that measures; seconds since its worker was heard of, and left of its lease."""
    known: dict[str, Any] = {
        "run_id": "01J", "check": "demo", "status": RunStatus.MEASURING, "stage": "int8 <b>",
        "tokens_done": 30, "tokens_total": 120, "trigger": "manual", "actor": None,
        "device": "cpu", "attempt": 1, "queued_at": NOW, "started_at": NOW,
        "cancel_requested_at": None,
        "heartbeat_at": None if heard is None else NOW - timedelta(seconds=heard),
        "lease_until": None if lease is None else NOW + timedelta(seconds=lease),
    }  # fmt: skip
    return UnendedRun(**known | values)


HEARD: dict[str, tuple[UnendedRun, str, bool]] = {
    "well": (run(), "4 s ago; its lease lasts 50 s", False),
    "not yet": (run(None, None), "none yet", False),
    "silent": (run(91, 20), "2 min ago: the worker is silent; its lease lasts 20 s", True),
    "a pause that is usual": (run(80, 20), "1 min ago; its lease lasts 20 s", False),
    "lost": (run(30, -1), "its lease has run out, so the run will be taken back", True),
    "waits again": (run(9999, None, status=RunStatus.QUEUED), "3 h ago", False),
}


@pytest.mark.parametrize(("one", "said", "silent"), HEARD.values(), ids=HEARD)
def test_heartbeats(one: UnendedRun, said: str, silent: bool) -> None:
    """Catches a worker that is silent on one page and well on another."""
    shown = str(progress.heartbeat(one, NOW))
    assert said in shown
    assert ("qw-hot" in shown) is silent is progress.is_silent(one, NOW)


def test_three_pages_say_the_same() -> None:
    """Catches a second table of words, and a bar that one reader can't hear."""
    one = run(91, 20)
    pages = (
        str(run_attempts.card(one, NOW, UTC)), str(live.cards([one], NOW)),
        str(service.run_row(one, NOW)),
    )  # fmt: skip
    for shown in pages:
        assert "easuring: int8 &lt;b&gt;" in shown
        assert "30 of 120 tokens, 25 %" in shown
        assert 'role="progressbar"' in shown
        assert "the worker is silent" in shown


@pytest.mark.parametrize("total", [0, 10], ids=["not known", "more than there is"])
def test_bars_have_bounds(total: int) -> None:
    """Catches a bar wider than its box, and one of nothing."""
    shown = str(progress.bar(run(tokens_total=total)))
    assert ("100 %" in shown) is (total == 10)
    assert ("not known yet" in shown) is (total == 0)


AGES = {4: "4 s ago", 59: "59 s ago", 200: "3 min ago", 4500: "1 h ago", 7200: "2 h ago"}


@pytest.mark.parametrize("seconds", AGES)
def test_one_age_of_one_instant(seconds: int) -> None:
    """Catches 75 min on one page and 1 h on another; only seconds are finer."""
    then = NOW - timedelta(seconds=seconds)
    assert text.age(then, NOW, fine=True) == AGES[seconds]
    assert text.age(then, NOW) == ({4: "just now", 59: "1 min ago"}.get(seconds, AGES[seconds]))


RHYTHMS = {
    "cron": ({"cron": "0 2 * * *"}, "0 2 * * * UTC"),
    "zone": ({"cron": "0 2 * * *", "zone": "Europe/Berlin"}, "0 2 * * * Europe/Berlin"),
    "every": ({"every": "6h", "zone": "Europe/Berlin"}, "every 6h<"),
    "nothing": ({}, "no schedule"),
}


@pytest.mark.parametrize(("settings", "said"), RHYTHMS.values(), ids=RHYTHMS)
def test_one_form_of_a_schedule(settings: dict[str, str], said: str) -> None:
    """Catches "every None", and a zone that an interval does not have."""
    planned = Planned("demo", Timetable(settings, NOW + timedelta(hours=2), None, None), None, None)
    shown = str(service.timetable([planned], (), NOW, UTC))
    assert said in shown
    assert "in 2 h" in shown


def planned(ahead_s: float = 60, trouble: str | None = None, **values: Any) -> Planned:
    slot = NOW + timedelta(seconds=ahead_s)
    usual = {"paused_at": None, "quarantined_at": None} | values
    return Planned("demo", Timetable({"every": "6h"}, slot, None, trouble), **usual)


SLOTS = {
    "ahead": (planned(), "in 1 min"),
    "due": (planned(-60), "due "),
    "overdue": (planned(-6000), "over"),
    "paused": (planned(paused_at=NOW), "paused"),
    "quarantine": (planned(quarantined_at=NOW), "in quarantine"),
    "trouble": (planned(trouble="no zone Mars"), "no zone Mars"),
}


@pytest.mark.parametrize(("state", "said"), SLOTS.values(), ids=SLOTS)
def test_why_a_check_does_not_run(state: Planned, said: str) -> None:
    """Catches a table of its own words beside those of the overview."""
    assert said in str(schedule.next_slot(state, NOW, UTC, busy=False))
    assert said in str(service.timetable([state], (), NOW, UTC))
