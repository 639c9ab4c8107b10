"""Silences, maintenance windows, dead-man, health: pure parts, as tables."""

from datetime import UTC, datetime, timedelta

import pytest

from quantwatch.alerts.dead_man import believed, dead_man, overdue_slot
from quantwatch.alerts.health import health
from quantwatch.alerts.silences import (
    Silence,
    checked_matcher,
    idle_globs,
    in_maintenance,
    is_silenced,
    matches,
)
from quantwatch.config.watching import MaintenanceConfig
from quantwatch.errors import UserError

LABELS = {"check": "nightly", "candidate": "int4", "rule": "layer-kl", "severity": "critical"}
NOON = datetime(2026, 3, 29, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)

MATCHERS = [
    ({"check": "nightly"}, True),
    ({"check": "night*", "rule": "layer-*"}, True),
    ({"check": "night*", "rule": "top1"}, False),
    ({"candidate": "int[48]"}, True),
    ({"candidate": "INT4"}, False),
    ({"severity": "warning"}, False),
    ({"rule": "*"}, True),
]


@pytest.mark.parametrize(("matcher", "hit"), MATCHERS)
def test_all_globs_must_match(matcher: dict[str, str], hit: bool) -> None:
    """Catches a silence that mutes what it doesn't name."""
    assert matches(matcher, LABELS) is hit


@pytest.mark.parametrize(
    ("offset", "muted"), [(-1, False), (0, True), (59, True), (60, False)], ids=str
)
def test_a_silence_begins_and_ends(offset: int, muted: bool) -> None:
    """Catches a silence that lasts forever, or whose end is still silent."""
    silence = Silence({"check": "*"}, NOON, NOON + HOUR)
    assert is_silenced([silence], LABELS, NOON + timedelta(minutes=offset)) is muted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "at least one of --check"),
        ({"check": None}, "at least one"),
        ({"layer": "*"}, "'layer'"),
        ({"severity": "foo"}, "severity 'foo' matches nothing; allowed: warning, critical"),
        ({"check": "*", "severity": "Critical"}, "'Critical' matches nothing"),
    ],
    ids=["nothing", "only blanks", "unknown", "no severity", "other case"],
)
def test_a_matcher_that_says_nothing_is_refused(given: dict[str, str | None], words: str) -> None:
    """Catches a silence that mutes everything by an oversight."""
    with pytest.raises(UserError, match=words):
        checked_matcher(given)


def test_globs_of_severities_are_allowed() -> None:
    """Catches a check of words that refuses what the help promises: a glob."""
    assert checked_matcher({"severity": "crit*"}) == {"severity": "crit*"}


def test_globs_that_match_nothing_known() -> None:
    """Catches a typo that silences nothing, unsaid."""
    known = {"check": {"nightly"}, "candidate": {"int8"}}
    given = {"check": "nix", "candidate": "int*", "severity": "critical"}
    assert idle_globs(given, known) == {"check": "nix"}


NIGHT = MaintenanceConfig(cron="30 2 * * *", zone="Europe/Berlin", length="2h")
WINDOWS = [
    # UTC: 30 March is summer time (02:30 = 00:30Z); on the 29th 02:30 is leapt over, to 03:00 = 01Z
    ("2026-03-28T01:29:59", False),
    ("2026-03-28T01:30:00", True),
    ("2026-03-28T03:29:59", True),
    ("2026-03-28T03:30:00", False),
    ("2026-03-29T00:59:00", False),
    ("2026-03-29T01:00:00", True),
    ("2026-03-29T02:59:00", True),
    ("2026-03-30T00:30:00", True),
]


@pytest.mark.parametrize(("at", "inside"), WINDOWS)
def test_a_maintenance_window_is_of_its_zone(at: str, inside: bool) -> None:
    """Catches a window that is an hour off after the clocks change."""
    assert in_maintenance([NIGHT], datetime.fromisoformat(at).replace(tzinfo=UTC)) is inside


SLOTS = [
    # hours before noon of the slots, of the last success, grace; overdue slot in hours before noon
    ([12], 11, 6, None),
    ([12], 12, 6, None),
    ([12], 13, 6, 12),
    ([12], None, 6, 12),
    ([5], None, 6, None),
    ([6], None, 6, 6),
    ([30, 6], 20, 6, 6),
    ([30, 5], 20, 6, None),
    ([], None, 6, None),
]


@pytest.mark.parametrize(("slots", "success", "grace", "overdue"), SLOTS)
def test_a_success_is_due_until_slot_plus_grace(
    slots: list[int], success: int | None, grace: int, overdue: int | None
) -> None:
    """Catches a dead-man alert that cries before the grace is over, or never."""
    found = overdue_slot(
        [NOON - hours * HOUR for hours in slots],
        None if success is None else NOON - success * HOUR,
        grace * HOUR,
        NOON,
    )
    assert found == (None if overdue is None else NOON - overdue * HOUR)


BELIEVED = {
    "never": (None, None),
    "before": (-5, -5),
    "now": (0, 0),
    "ahead by a step of the clock": (0.1, 0),
    "ahead by the grace": (6, 0),
    "years ahead": (9 * 365 * 24, None),
}


@pytest.mark.parametrize(("hours", "found"), BELIEVED.values(), ids=BELIEVED.keys())
def test_a_success_in_the_future_is_no_success(hours: float | None, found: float | None) -> None:
    """Catches a host in 2036 whose success keeps the dead-man alert blind for ten years."""
    last = None if hours is None else NOON + hours * HOUR
    assert believed(last, 6 * HOUR, NOON) == (None if found is None else NOON + found * HOUR)


def test_the_dead_man_alert_says_what_was_expected() -> None:
    """Catches a message from which nobody learns which night is missing."""
    found = dead_man(NOON - 12 * HOUR, None, 6 * HOUR, NOON)
    assert found.words == (
        "no successful run although the slot of 2026-03-29 00:00 UTC should have had one by "
        "2026-03-29 06:00 UTC; last success: never"
    )
    assert (found.outcome, found.value, found.threshold) == ("breach", 43200.0, 21600.0)
    assert dead_man(None, NOON, 6 * HOUR, NOON).outcome == "clear"


HEALTH = [
    (0, 2, False, "clear"), (1, 2, False, "between"), (2, 2, False, "breach"),
    (3, 2, False, "breach"), (1, 1, False, "breach"), (0, 2, True, "breach"),
]  # fmt: skip


@pytest.mark.parametrize(("unhealthy", "limit", "quarantined", "outcome"), HEALTH)
def test_health(unhealthy: int, limit: int, quarantined: bool, outcome: str) -> None:
    """Catches one bad night that pages, and a quarantine that nobody hears of."""
    assert health(unhealthy, limit, "run X failed", quarantined=quarantined).outcome == outcome
