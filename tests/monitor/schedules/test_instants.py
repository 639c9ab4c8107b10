"""The vectors of service_anchors §7.1, and what holds for every schedule."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch.schedules import (
    Cron,
    Interval,
    Window,
    instants,
    jitter_of,
    next_instant,
    next_three,
)

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
SPRING_BERLIN = ("2026-03-28T12:00:00+01:00", "2026-03-31T12:00:00+02:00")
SPRING_NEW_YORK = ("2026-03-07T12:00:00-05:00", "2026-03-10T12:00:00-04:00")
AUTUMN_NEW_YORK = ("2026-10-31T12:00:00-04:00", "2026-11-02T12:00:00-05:00")
VECTORS = {
    "Berlin 00:00 spring (B02)": (BERLIN, "0 0 * * *", SPRING_BERLIN,
        ["2026-03-29T00:00+01:00", "2026-03-30T00:00+02:00", "2026-03-31T00:00+02:00"]),
    "Berlin 00:30 spring": (BERLIN, "30 0 * * *", SPRING_BERLIN,
        ["2026-03-29T00:30+01:00", "2026-03-30T00:30+02:00", "2026-03-31T00:30+02:00"]),
    "Berlin 02:30 spring (B03)": (BERLIN, "30 2 * * *", SPRING_BERLIN,
        ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00", "2026-03-31T02:30+02:00"]),
    "Berlin 03:00 spring": (BERLIN, "0 3 * * *", SPRING_BERLIN,
        ["2026-03-29T03:00+02:00", "2026-03-30T03:00+02:00", "2026-03-31T03:00+02:00"]),
    "Berlin 02:30 autumn (B03)": (BERLIN, "30 2 * * *",
        ("2026-10-24T12:00:00+02:00", "2026-10-26T12:00:00+01:00"),
        ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
    "New York 00:00 spring (B02)": (NEW_YORK, "0 0 * * *", SPRING_NEW_YORK,
        ["2026-03-08T00:00-05:00", "2026-03-09T00:00-04:00", "2026-03-10T00:00-04:00"]),
    "New York 00:30 spring": (NEW_YORK, "30 0 * * *", SPRING_NEW_YORK,
        ["2026-03-08T00:30-05:00", "2026-03-09T00:30-04:00", "2026-03-10T00:30-04:00"]),
    "New York 02:00 spring": (NEW_YORK, "0 2 * * *", SPRING_NEW_YORK,
        ["2026-03-08T03:00-04:00", "2026-03-09T02:00-04:00", "2026-03-10T02:00-04:00"]),
    "New York 02:30 spring": (NEW_YORK, "30 2 * * *", SPRING_NEW_YORK,
        ["2026-03-08T03:00-04:00", "2026-03-09T02:30-04:00", "2026-03-10T02:30-04:00"]),
    "New York 01:00 autumn": (NEW_YORK, "0 1 * * *", AUTUMN_NEW_YORK,
        ["2026-11-01T01:00-04:00", "2026-11-02T01:00-05:00"]),
    "New York 01:30 autumn": (NEW_YORK, "30 1 * * *", AUTUMN_NEW_YORK,
        ["2026-11-01T01:30-04:00", "2026-11-02T01:30-05:00"]),
    "Sunday is 0": (BERLIN, "0 2 * * 0", ("2026-05-01T00:00:00+02:00", "2026-05-11T00:00:00+02:00"),
        ["2026-05-03T02:00+02:00", "2026-05-10T02:00+02:00"]),
    "Sunday is 7": (BERLIN, "0 2 * * 7", ("2026-05-01T00:00:00+02:00", "2026-05-11T00:00:00+02:00"),
        ["2026-05-03T02:00+02:00", "2026-05-10T02:00+02:00"]),
    "Sunday is SUN": (BERLIN, "0 2 * * Sun", ("2026-05-01T00:00:00+02:00", "2026-05-11T00:00:00+02:00"),
        ["2026-05-03T02:00+02:00", "2026-05-10T02:00+02:00"]),
    "UTC": ("UTC", "30 2 * * *", ("2026-03-28T12:00:00+00:00", "2026-03-30T12:00:00+00:00"),
        ["2026-03-29T02:30+00:00", "2026-03-30T02:30+00:00"]),
    "a skipped day has no night, its neighbours have one each": ("Pacific/Apia", "30 2 * * *",
        ("2011-12-28T12:00:00-10:00", "2012-01-01T00:00:00+14:00"),
        ["2011-12-29T02:30-10:00", "2011-12-31T02:30+14:00"]),
    "29 February": ("UTC", "0 0 29 2 *", ("2026-01-01T00:00:00+00:00", "2033-01-01T00:00:00+00:00"),
        ["2028-02-29T00:00+00:00", "2032-02-29T00:00+00:00"]),
}  # fmt: skip


@pytest.mark.parametrize("case", VECTORS)
def test_vectors(case: str) -> None:
    """B02, B03: nights that are lost, doubled, or at a time that no clock shows."""
    zone, text, (start, end), expected = VECTORS[case]
    found = instants(Cron(text, zone), datetime.fromisoformat(start), datetime.fromisoformat(end))
    local = [instant.astimezone(ZoneInfo(zone)).isoformat(timespec="minutes") for instant in found]
    assert local == expected


def test_interval_is_elapsed_time() -> None:
    """§7.1: an interval over a change of the clocks keeps its length, not its wall time."""
    anchor = datetime.fromisoformat("2026-03-27T02:00:00+01:00")
    daily = Interval(timedelta(days=1), anchor)
    local = [i.astimezone(ZoneInfo(BERLIN)).isoformat() for i in next_three(daily, anchor)]
    assert local == [
        "2026-03-28T02:00:00+01:00",
        "2026-03-29T03:00:00+02:00",
        "2026-03-30T03:00:00+02:00",
    ]


ANCHOR = datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param(-3600, 21600, id="long before the anchor"),
        pytest.param(0, 21600, id="at the anchor"),
        pytest.param(21599, 21600, id="just before"),
        pytest.param(21600, 43200, id="strictly after"),
        pytest.param(21600.5, 43200, id="half a second later"),
    ],
)
def test_interval_counts_from_its_anchor(after: float, expected: float) -> None:
    """Catches an interval that drifts with the moment at which somebody asks."""
    found = next_instant(Interval(timedelta(hours=6), ANCHOR), ANCHOR + timedelta(seconds=after))
    assert found == ANCHOR + timedelta(seconds=expected)


@pytest.mark.parametrize("every", [timedelta(0), timedelta(seconds=-5), timedelta(milliseconds=5)])
def test_no_interval_of_nothing(every: timedelta) -> None:
    """Catches a loop that never gets on."""
    with pytest.raises(ValueError, match="allowed: 1s or more"):
        Interval(every, ANCHOR)


def test_naive_times_are_refused() -> None:
    """B30: a naive time would be taken for the zone of whatever host runs this."""
    daily = Cron("0 2 * * *")
    with pytest.raises(ValueError, match="has no time zone"):
        next_instant(daily, datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="has no time zone"):
        list(instants(daily, ANCHOR, datetime(2026, 1, 2)))
    with pytest.raises(ValueError, match="has no time zone"):
        Interval(timedelta(days=1), datetime(2026, 1, 1))


def test_any_zone_may_ask() -> None:
    """Catches an answer that depends on the zone in which `after` is written."""
    daily = Cron("30 2 * * *", BERLIN)
    asked = [
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC).astimezone(ZoneInfo(z))
        for z in (BERLIN, NEW_YORK, "UTC")
    ]
    assert {next_instant(daily, after) for after in asked} == {
        datetime(2026, 10, 26, 1, 30, tzinfo=UTC)
    }


crons = st.builds(
    "{} {} * * {}".format,
    st.sampled_from(["0", "30", "*/20", "15,45", "59"]),
    st.sampled_from(["0", "2", "*", "*/2", "1-3", "23"]),
    st.sampled_from(["*", "0", "7", "1-5"]),
)
zones = st.sampled_from(
    [BERLIN, NEW_YORK, "Australia/Lord_Howe", "America/Havana", "Antarctica/Troll", "UTC"]
)
moments = st.datetimes(datetime(2026, 1, 1), datetime(2027, 12, 31)).map(
    lambda d: d.replace(tzinfo=UTC)
)


@given(crons, zones, moments, st.integers(0, 40))
@settings(max_examples=60)
def test_one_walk_or_many_steps(text: str, zone: str, start: datetime, hours: int) -> None:
    """Law: the instants of a span are what repeated asking for the next one finds, in order."""
    schedule, end = Cron(text, zone), start + timedelta(hours=hours)
    walked, at = [], start
    while (at := next_instant(schedule, at)) <= end:
        walked.append(at)
    assert list(instants(schedule, start, end)) == walked
    assert walked == sorted(set(walked))


@given(st.text(max_size=40), st.integers(0, 100_000))
def test_jitter_is_within_its_bounds(check: str, most: int) -> None:
    """Law: 0 … most whole seconds, the same each time."""
    found = jitter_of(check, timedelta(seconds=most))
    assert timedelta(0) <= found <= timedelta(seconds=most)
    assert found == jitter_of(check, timedelta(seconds=most))
    assert found.microseconds == 0


def test_jitter_spreads() -> None:
    """Catches a herd: 200 checks of one minute that all start together, or a changed digest."""
    starts = [jitter_of(f"check-{i}", timedelta(minutes=10)).seconds for i in range(200)]
    assert len(set(starts)) > 150
    assert min(starts) < 30
    assert max(starts) > 570
    assert jitter_of("nightly", timedelta(minutes=10)) == timedelta(seconds=NIGHTLY_JITTER)


NIGHTLY_JITTER = 391
"""A constant: another value would move every check of every installation."""


WINDOW = Window(Cron("30 1 * * *", BERLIN), timedelta(hours=2))


@pytest.mark.parametrize(
    ("at", "end"),
    [
        pytest.param("2026-06-01T01:29:59+02:00", None, id="just before"),
        pytest.param("2026-06-01T01:30:00+02:00", "2026-06-01T03:30:00+02:00", id="begins"),
        pytest.param("2026-06-01T03:29:59+02:00", "2026-06-01T03:30:00+02:00", id="last second"),
        pytest.param("2026-06-01T03:30:00+02:00", None, id="its end is outside"),
        pytest.param(
            "2026-03-29T04:15:00+02:00", "2026-03-29T04:30:00+02:00", id="spring: two hours elapse"
        ),
        pytest.param(
            "2026-10-25T02:29:00+01:00", "2026-10-25T02:30:00+01:00", id="autumn: two hours elapse"
        ),
        pytest.param("2026-10-25T02:31:00+01:00", None, id="autumn: the second 02:31 is outside"),
    ],
)
def test_windows(at: str, end: str | None) -> None:
    """Catches a maintenance window of one or three hours on the days of a change."""
    instant = datetime.fromisoformat(at)
    assert (instant in WINDOW) == (end is not None)
    assert WINDOW.end(instant) == (None if end is None else datetime.fromisoformat(end))


def test_windows_that_overlap_are_one() -> None:
    """Catches a message in the middle of maintenance, at the end of an older window."""
    hourly = Window(Cron("0 * * * *"), timedelta(minutes=90))
    at = datetime(2026, 6, 1, 12, 15, tzinfo=UTC)
    assert hourly.end(at) == datetime(2026, 6, 1, 13, 30, tzinfo=UTC)
