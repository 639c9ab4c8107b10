"""Which checks a reader sees, in which order, and the answer to "is it worse?" in words."""

import base64
import math
import re
from datetime import timedelta
from typing import Any

import pytest
from tests.dashboard.test_dashboard_history import CONFIG, NIGHT, START, recent, run, state

from quantwatch.domain import RunStatus, Verdict
from quantwatch.store.checks import Pause
from quantwatch.store.states import Headline, OpenAlerts
from quantwatch.store.timetables import Timetable
from quantwatch_dashboard import text
from quantwatch_dashboard.charts.sparkline import sparkline
from quantwatch_dashboard.components.schedule import next_runs
from quantwatch_dashboard.logic import standings, verdict_words
from quantwatch_dashboard.logic.lines import Guide, Sparkline
from quantwatch_dashboard.logic.standings import Wanted
from quantwatch_dashboard.logic.summaries import CheckSummary, summarize

NOW = START + 10 * NIGHT
BASELINE = {name: Headline(name, 0.1, "finite", None, None) for name in "ab"}


def check(name: str, verdict: Verdict | None = Verdict.PASS, **given: Any) -> CheckSummary:
    decided = None if verdict is None else run(2, verdict)
    return summarize(state(**{"check": name, "decided": decided} | given))


def planned(at: timedelta) -> Timetable:
    return Timetable({"cron": "0 2 * * *", "zone": "UTC"}, NOW + at, None, None)


CHECKS = sorted(
    (
        check("bad", Verdict.REGRESSION, since=NOW - NIGHT, alerts=OpenAlerts(2, 1, 0)),
        check("paused", pause=Pause(NOW, "ann", "holiday"), timetable=planned(-NIGHT)),
        check("late", timetable=planned(-NIGHT), config=CONFIG | {"tags": ["Nightly"]}),
        check("soon", timetable=planned(NIGHT)),
        check("broken", Verdict.WARN, newest=run(3, None, RunStatus.FAILED)),
        check("new", None, newest=None, since=None),
    ),
    key=lambda one: one.order,
)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        pytest.param({}, "bad new broken late paused soon", id="worst first"),
        pytest.param({"verdict": "regression"}, "bad", id="verdict"),
        pytest.param({"verdict": "none"}, "new", id="without a verdict"),
        pytest.param({"state": "alerts"}, "bad", id="alerts"),
        pytest.param({"state": "trouble"}, "broken", id="trouble"),
        pytest.param({"state": "paused"}, "paused", id="paused"),
        pytest.param({"state": "overdue"}, "late", id="a paused check is not overdue"),
        pytest.param({"tag": "Nightly"}, "late", id="tag"),
        pytest.param({"search": "  NIGHTLY la"}, "late", id="every word, any case"),
        pytest.param({"search": "<b>"}, "", id="nothing fits"),
        pytest.param({"sort": "name", "verdict": "pass"}, "late paused soon", id="by name"),
        pytest.param({"sort": "next", "verdict": "pass"}, "late soon paused", id="next run"),
    ],
)
def test_filters_and_order(wanted: dict[str, str], names: str) -> None:
    """Catches a filter that hides the worst check, or one that is ignored."""
    found = standings.matching(CHECKS, Wanted(**wanted), NOW)
    assert [one.check for one in found] == names.split()


def test_largest_change_is_against_the_own_baseline() -> None:
    """Catches an order by the value itself: a coarse recipe is not worse than it was."""
    coarse = check("coarse", baseline=BASELINE, recent=(recent(2, 0.11, 0.1),))
    moved = check("moved", baseline=BASELINE, recent=(recent(2, 0.1, 0.4),))
    gone = check("gone", baseline=BASELINE, recent=(recent(2, "nan", 0.1),))
    found = standings.matching((coarse, moved, gone), Wanted(sort="change"), NOW)

    assert [one.check for one in found] == ["gone", "moved", "coarse"]
    assert standings.lead(moved) == 1
    assert standings.ratio(moved, 1) == pytest.approx(4)
    assert standings.ratio(gone, 0) == math.inf
    assert standings.ratio(check("x"), 0) is None


@pytest.mark.parametrize(
    ("found", "headline", "answer"),
    [
        pytest.param(
            CHECKS, "1 regression",
            "Worse: bad since 24 h (a: layers.3). Besides: 1 with a warning, 1 with no result "
            "from the newest run, 1 overdue, 1 paused.", id="worse",
        ),
        pytest.param(
            [check("a"), check("b")], "All checks pass",
            "Not worse: none of the checks breaches a rule that makes a regression.", id="fine",
        ),
        pytest.param(
            [check("a"), check("b", None, newest=None)], "No regression",
            "Not worse: none of 1 with a verdict breaches a rule that makes a regression.",
            id="not all are known",
        ),
        pytest.param(
            [check("b", None, newest=None)], "No check has a verdict yet",
            "Nothing is known yet: no run has succeeded.", id="nothing is known",
        ),
        pytest.param(
            [], "No check is configured",
            "Nothing is watched: every check below was taken out of the configuration.",
            id="nothing is watched",
        ),
        pytest.param(
            [check("a", Verdict.INCONCLUSIVE)], "1 inconclusive",
            "Not worse: none of the checks breaches a rule that makes a regression. Besides: "
            "1 inconclusive.", id="undecided",
        ),
    ],
)  # fmt: skip
def test_is_it_worse(found: list[CheckSummary], headline: str, answer: str) -> None:
    """Catches "all is well" said of what was not measured, and a number without a name."""
    assert verdict_words.headline(found) == headline
    assert verdict_words.answer(found, {"bad": "a: layers.3"}, NOW) == answer


def test_the_answer_names_what_became_worse_last() -> None:
    """Catches a fresh regression that is hidden behind last month's."""
    old = [check(f"old{i}", Verdict.REGRESSION, since=START + i * NIGHT) for i in range(3)]
    new = check("new", Verdict.REGRESSION, since=NOW)
    words = verdict_words.answer([*old, new], {}, NOW)

    assert words == "Worse: new since just now; old2 since 8 d; and 2 more."


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (timedelta(seconds=9), "now"),
        (timedelta(hours=5), "in 5 h"),
        (-timedelta(days=3), "3 d ago"),
    ],
    ids=["at once", "ahead", "over"],
)
def test_how_far_ahead(ahead: timedelta, said: str) -> None:
    """Catches a run of yesterday that is announced for tomorrow."""
    assert text.until(NOW + ahead, NOW) == said


def test_sparkline_has_a_baseline_and_its_band_inside_the_picture() -> None:
    """Catches a band that begins below zero, where a log axis has no place for it."""
    guide = Guide(0, baseline=0.1, low=0.0, high=0.3)
    picture = sparkline([Sparkline(0, [0.1, 0.2])], 2, guide)
    drawn = base64.b64decode(picture.split(",")[1]).decode()
    heights = [float(y) for y in re.findall(r' (?:y|y1|height)="([^"]+)"', drawn)]

    assert "stroke-dasharray" in drawn
    assert all(0 <= height <= 44 for height in heights)


@pytest.mark.parametrize(
    ("settings", "known", "hours"),
    [
        pytest.param({"cron": "0 5 * * *", "zone": "UTC"}, None, [2, 26, 50], id="cron"),
        pytest.param({"every": "6h"}, 1, [1, 7, 13], id="interval"),
        pytest.param({"every": "6h"}, -1, [5, 11, 17], id="an interval that is overdue"),
        pytest.param({"every": "6h"}, None, [], id="an interval that has not begun"),
        pytest.param({"cron": "every day"}, None, [], id="not read any more"),
    ],
)
def test_next_runs(settings: dict[str, str], known: int | None, hours: list[int]) -> None:
    """Catches a next run that lies in the past, or none at all."""
    slot = None if known is None else NOW + timedelta(hours=known)
    found = next_runs(Timetable(settings, slot, None, None), NOW)
    assert [(at - NOW) / timedelta(hours=1) for at in found] == hours


@pytest.mark.parametrize(
    ("settings", "minutes", "late"),
    [
        pytest.param({"jitter": "10m"}, 12, False, id="within its jitter"),
        pytest.param({"jitter": "10m"}, 16, True, id="after it"),
        pytest.param({}, 6, True, id="without jitter"),
        pytest.param({"jitter": "soon"}, 6, True, id="jitter that can't be read"),
        pytest.param({}, -6, False, id="ahead"),
    ],
)
def test_a_slot_is_late_only_after_its_jitter(
    settings: dict[str, str], minutes: int, late: bool
) -> None:
    """Catches a page that cries wolf in the ten minutes in which every check starts."""
    slot = NOW - timedelta(minutes=minutes)
    assert standings.is_late(Timetable(settings, slot, None, None), NOW) is late
