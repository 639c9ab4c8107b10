"""What people write: cron texts and zones, good and bad, in code and in quantwatch.toml."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.config.load import load_config
from quantwatch.config.plans import plan_of, window_of
from quantwatch.errors import ConfigError
from quantwatch.schedules import Cron, Interval, jitter_of, next_instant, parse_cron, parse_zone
from quantwatch.schedules.zones import RENAMED, next_change

GOOD = {
    "plain": "0 2 * * *",
    "Sunday 7": "0 2 * * 7",
    "Sunday in a range": "0 2 * * 5-7",
    "names": "0 2 * JAN-mar,dec mon-FRI",
    "lists, ranges, steps": "0,15-45/15 */6 1-31/2 * *",
    "star in a list": "*,5 2 * * *",
    "blanks": "  0\t2  * * *\n",
    "29 February": "0 0 29 2 *",
    "31st, in the months that have one": "0 0 31 * *",
    "30 February or a Monday": "0 0 30 2 1",
}
BAD = {
    "nothing": ("", "has 0 fields"),
    "four fields": ("0 2 * *", "has 4 fields; allowed: five"),
    "seconds": ("0 0 2 * * *", "has 6 fields; allowed: five"),
    "macro": ("@daily", "has 1 field; allowed: five"),
    "minute 60": ("60 2 * * *", "'60' in '60 2 * * *' is no minute; allowed: 0-59"),
    "hour 24": ("0 24 * * *", "is no hour; allowed: 0-23"),
    "day 0": ("0 2 0 * *", "is no day of month; allowed: 1-31"),
    "month 13": ("0 2 * 13 *", "is no month; allowed: 1-12 or JAN-DEC"),
    "weekday 8": ("0 2 * * 8", "is no day of week; allowed: 0-7 or SUN-SAT"),
    "step 0": ("*/0 2 * * *", "is no minute"),
    "range backwards": ("0 2 * * FRI-MON", "is no day of week"),
    "empty list entry": ("1, 2 * * *", "is no minute"),
    "negative": ("-1 2 * * *", "is no minute"),
    "another alphabet": ("² 2 * * *", "is no minute"),
    "a letter that becomes S": ("0 2 * * \u017fun", "is no day of week"),
    "last day": ("0 2 L * *", "is no day of month"),
    "last weekday": ("0 2 LW * *", "is no day of month"),
    "last Friday": ("0 2 * * 5L", "is no day of week"),
    "second Friday": ("0 2 * * 5#2", "is no day of week"),
    "step without a range": ("10/5 2 * * *", "is no minute"),
    "30 February": ("0 0 30 2 *", "doesn't fire within four years"),
    "31 April": ("0 0 31 4,6,9,11 *", "doesn't fire within four years"),
    "29 February on a Saturday only": ("0 0 29 2 */6", "doesn't fire within four years"),
}


@pytest.mark.parametrize("case", GOOD)
def test_good_texts(case: str) -> None:
    """Catches a refusal of what Debian's crontab takes."""
    text = parse_cron(GOOD[case])
    assert text == " ".join(GOOD[case].split())
    assert next_instant(Cron(GOOD[case]), datetime(2026, 1, 1, tzinfo=UTC)).year < 2030


@pytest.mark.parametrize("case", BAD)
def test_bad_texts(case: str) -> None:
    """Catches a schedule that never runs, or at another time than people think."""
    text, words = BAD[case]
    with pytest.raises(ValueError, match="allowed: ") as caught:
        parse_cron(text)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


@given(st.text("0123456789*/-,LW#?@ SUNMO", max_size=20) | st.text(max_size=20))
def test_any_text_is_taken_or_named(text: str) -> None:
    """Law: whatever is written either has a next instant or one sentence says why not."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    try:
        found, words = next_instant(Cron(text), start), ""
    except ValueError as error:
        found, words = None, str(error)
    if found is None:
        assert repr(text) in words
        assert "allowed: " in words
    else:
        assert found > start


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Mars/Olympus", "allowed: IANA names"),
        ("europe/berlin", "did you mean Europe/Berlin?"),
        ("Berlin", "did you mean Europe/Berlin?"),
        ("America", "allowed: IANA names"),
        ("", "allowed: IANA names"),
        ("../../etc/passwd", "allowed: IANA names"),
        ("/etc/localtime", "allowed: IANA names"),
        ("UTC\0", "allowed: IANA names"),
        ("localtime", "allowed: IANA names"),
        ("right/Europe/Berlin", "allowed: IANA names"),
        ("\ud800", "allowed: IANA names"),
    ],
)
def test_unknown_zones(name: str, hint: str) -> None:
    """Catches a crash on a folder, a file outside, a scale with leap seconds, the host's own zone."""
    with pytest.raises(ValueError, match="is no time zone") as caught:
        parse_zone(name)
    assert repr(name) in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("old", RENAMED)
def test_renamed_zones(old: str) -> None:
    """healthchecks#1250: a zone that a new tzdata calls otherwise goes on working."""
    new = parse_zone(old)
    assert new == RENAMED[old] != old
    assert parse_zone(new) == new
    assert Cron("0 2 * * *", old) == Cron("0 2 * * *", new)


def test_change_of_the_clocks_to_the_second() -> None:
    """Catches a change that is found a second early or late."""
    start = datetime(2026, 3, 20, 5, 17, 3, 5, tzinfo=UTC)
    change = next_change(ZoneInfo("Europe/Berlin"), start, start + timedelta(days=30))
    assert change == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)
    assert next_change(ZoneInfo("Europe/Berlin"), start, start + timedelta(days=5)) is None


CHECK = """
schema_version = 1
[checks.nightly]
suite = "core-v1:demo"
reference = {{ model = "m" }}
candidates = [{{ name = "x", model = "m" }}]
{section}
"""
SECTIONS = {
    "cron": (
        'schedule = { cron = "0 2 * * * *" }',
        "checks.nightly.schedule.cron: '0 2 * * * *' has 6",
    ),
    "cron that never fires": (
        'schedule = { cron = "0 0 30 2 *" }',
        "checks.nightly.schedule.cron: '0 0 30 2 *' doesn't fire",
    ),
    "zone": (
        'schedule = { cron = "0 2 * * *", zone = "Mars/X" }',
        "checks.nightly.schedule.zone: 'Mars/X' is no time zone",
    ),
    "maintenance cron": (
        'alerting = { maintenance = [{ cron = "61 * * * *", length = "1h" }] }',
        "checks.nightly.alerting.maintenance[0].cron: '61' in '61 * * * *' is no minute",
    ),
    "maintenance zone": (
        'alerting = { maintenance = [{ cron = "0 * * * *", zone = "X", length = "1h" }] }',
        "checks.nightly.alerting.maintenance[0].zone: 'X' is no time zone",
    ),
}


@pytest.mark.parametrize("case", SECTIONS)
def test_bad_schedules_in_the_file(case: str, tmp_path: Path) -> None:
    """Catches a bad schedule that is noticed at night by the service instead of by the editor."""
    section, words = SECTIONS[case]
    path = tmp_path / "quantwatch.toml"
    path.write_text(CHECK.format(section=section))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert words in str(caught.value)
    assert "allowed: " in str(caught.value)


def test_plan_of_a_section(tmp_path: Path) -> None:
    """Catches a section whose words and values go apart; the text itself stays as written."""
    path = tmp_path / "quantwatch.toml"
    sections = (
        'schedule = { cron = "0 2 * * 7", zone = "Europe/Kiev", grace = "3h", jitter = "1h" }\n'
        'alerting = { maintenance = [{ cron = "0 22 * * *", length = "90m" }] }'
    )
    path.write_text(CHECK.format(section=sections))
    check = load_config(path).checks["nightly"]
    assert check.schedule is not None
    assert check.schedule.zone == "Europe/Kiev"
    plan = plan_of("nightly", check.schedule, datetime(2026, 1, 1, tzinfo=UTC))
    assert plan.schedule == Cron("0 2 * * 7", "Europe/Kyiv")
    assert plan.grace == timedelta(hours=3)
    assert plan.jitter == jitter_of("nightly", timedelta(hours=1))
    assert (plan.catch_up, plan.deadline_s, plan.attempts) == (True, 7200.0, 3)
    window = window_of(check.alerting.maintenance[0])
    assert datetime(2026, 1, 1, 23, 29, tzinfo=UTC) in window
    assert datetime(2026, 1, 1, 23, 30, tzinfo=UTC) not in window


def test_plan_of_an_interval(tmp_path: Path) -> None:
    """Catches an interval that forgets its anchor."""
    path = tmp_path / "quantwatch.toml"
    path.write_text(CHECK.format(section='schedule = { every = "6h", catch_up = "none" }'))
    section = load_config(path).checks["nightly"].schedule
    assert section is not None
    anchor = datetime(2026, 1, 1, tzinfo=UTC)
    plan = plan_of("nightly", section, anchor)
    assert plan.schedule == Interval(timedelta(hours=6), anchor)
    assert not plan.catch_up
