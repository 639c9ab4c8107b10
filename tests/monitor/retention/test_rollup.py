"""Which runs keep what: a table, and laws over any history."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.config.service import RetentionConfig
from quantwatch.store.rollup import Kept, Limits, StoredRun, kept

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)  # a Sunday
LIMITS = Limits(2, *(timedelta(days=days) for days in (20, 10, 30, 360, 60)))


def run(days: float, name: str = "r", **fields: object) -> StoredRun:
    started = NOW - timedelta(days=days)
    values = {"check_id": 1, "ended": True, "succeeded": True, "flagged": False} | fields
    return StoredRun(id=name, started_at=started, **values)  # type: ignore[arg-type]


def tiers(found: Kept, name: str = "r") -> str:
    sets = zip("TPLR", (found.tokens, found.prompts, found.layers, found.runs), strict=True)
    return "".join(letter for letter, ids in sets if name in ids)


NEWER = [run(0, "new1"), run(0.5, "new2")]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param(run(9), "PLR", id="young, beyond the newest two"),
        pytest.param(run(11), "LR", id="prompt sums are over"),
        pytest.param(run(31), "LR", id="the only one of its week keeps its layers"),
        pytest.param(run(361), "L", id="the run itself is over"),
        pytest.param(run(19, flagged=True), "TPLR", id="flagged keeps matrices"),
        pytest.param(run(21, flagged=True), "PLR", id="flagged loses token matrices"),
        pytest.param(run(361, flagged=True), "PL", id="a flagged run ends, too"),
        pytest.param(run(900, ended=False, succeeded=False), "TPLR", id="what has not ended stays"),
        pytest.param(run(900, kept_until=NOW + timedelta(days=1)), "TPLR", id="kept by hand"),
        pytest.param(run(900, kept_until=NOW - timedelta(days=1)), "L", id="no longer kept"),
        pytest.param(run(40, succeeded=False), "R", id="a failed run has nothing to keep"),
    ],
)
def test_a_run_keeps(one: StoredRun, expected: str) -> None:
    """Catches a limit read in the wrong direction, or applied to the wrong tier."""
    assert tiers(kept([one, *NEWER], LIMITS, NOW)) == expected


@pytest.mark.parametrize("days", [5, 50, 500, 5000])
def test_what_is_held_keeps_everything(days: int) -> None:
    """Catches a pinned baseline that ages."""
    assert tiers(kept([run(days), *NEWER], LIMITS, NOW, held={"r"})) == "TPLR"
    assert tiers(kept([run(days), *NEWER], LIMITS, NOW, newest={"r"}))[-2:] == "LR"


def test_a_rolling_baseline_keeps_its_sums() -> None:
    """Catches a monthly check whose rolling mean loses most of its runs after 90 days."""
    months = [run(30 * n, f"m{n}", flagged=n == 2) for n in range(1, 7)]
    other = run(40, "other", check_id=2)
    found = kept([*months, other], LIMITS, NOW, windows={1: 3})
    assert found.prompts == {"m1", "m2", "m3", "m4"}  # m2 is flagged and kept for that


def test_the_baseline_of_a_kept_comparison_is_kept() -> None:
    """Catches a comparison of which one side is gone."""
    baseline = run(900, "base")
    for days, expected in [(0, "TPLR"), (5, "PLR"), (15, "LR"), (100, "LR"), (400, "L")]:
        one = run(days, "one", baseline_run_id="base")
        others = NEWER if days else []
        assert tiers(kept([baseline, one, *others], LIMITS, NOW), "base") == expected, days


def test_one_run_a_week_keeps_its_layers() -> None:
    """Catches thinning that drops the week, keeps the wrong night, or mixes checks."""
    nights = [run(days, f"n{days}") for days in range(28, 60)]
    other = run(50.5, "other", check_id=2)
    found = kept([*nights, other, *NEWER], LIMITS, NOW).layers
    old = {f"n{days}" for days in range(31, 60)} & found
    assert old == {"n35", "n42", "n49", "n56"}, "Sundays, the last of each ISO week"
    assert {"n28", "n29", "n30", "other"} <= found


def test_a_failed_night_does_not_stand_for_its_week() -> None:
    """Catches a week that loses its statistics because its last run had none."""
    nights = [run(42, "sunday", succeeded=False), run(43, "saturday"), run(44, "friday")]
    assert kept([*nights, *NEWER], LIMITS, NOW).layers & {"saturday", "friday"} == {"saturday"}


def test_each_check_keeps_its_own_newest() -> None:
    """Catches a busy check that pushes out a quiet one's matrices."""
    busy = [run(days / 10, f"b{days}") for days in range(20)]
    quiet = [run(90 + days, f"q{days}", check_id=2) for days in range(3)]
    assert kept([*busy, *quiet], LIMITS, NOW).tokens == {"b0", "b1", "q0", "q1"}


def test_the_limits_come_from_the_settings() -> None:
    """Catches a limit that is read from another key."""
    limits = Limits.of(RetentionConfig())
    days = [t.days for t in (limits.flagged, limits.prompts, limits.statistics, limits.runs)]
    assert (limits.token_runs, days, limits.logs.days) == (7, [180, 90, 730, 1830], 180)


HISTORY = st.lists(
    st.builds(
        run,
        st.floats(0, 800),
        st.uuids().map(str),
        check_id=st.integers(1, 2),
        succeeded=st.booleans(),
        flagged=st.booleans(),
        baseline_run_id=st.none() | st.just("base"),
    ),
    max_size=30,
)


@given(HISTORY, st.floats(0, 400))
def test_laws_of_keeping(history: list[StoredRun], later: float) -> None:
    """Catches something that comes back when time passes, and a second pass that finds more."""
    first = kept(history, LIMITS, NOW)
    # What stays after deleting what goes is the same when asked again.
    left = [r for r in history if r.id in first.runs]
    again = kept(left, LIMITS, NOW)
    known = {r.id for r in left}
    assert again.tokens & known == first.tokens & known
    assert again.prompts & known == first.prompts & known
    assert again.layers & known >= first.layers & known
    # Nobody gets a tier back later.
    after = kept(history, LIMITS, NOW + timedelta(days=later))
    assert after.tokens <= first.tokens
    assert after.prompts <= first.prompts
    assert after.layers <= first.layers
    assert after.runs <= first.runs
