"""How a check stands and what changed over its runs: from records alone."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from quantwatch.domain import RunStatus, Severity, Verdict
from quantwatch.store.marks import CandidateMark, RunMark
from quantwatch.store.records import RunSummary, SeriesPoint
from quantwatch.store.states import CheckState, Headline, OpenAlerts, RecentRun, UnendedRun
from quantwatch_dashboard.logic.history import changes, limits, tradeoffs
from quantwatch_dashboard.logic.summaries import summarize
from quantwatch_dashboard.logic.verdict_words import counts, headline

START = datetime(2026, 11, 1, 3, tzinfo=UTC)
NIGHT = timedelta(days=1)
CONFIG: dict[str, Any] = {
    "reference": {"model": "m"},
    "candidates": [{"name": "a", "model": "m"}, {"name": "b", "model": "m"}],
    "suite": "core-v1:demo",
    "tags": ["team", "nightly"],
}


def run(
    number: int, verdict: Verdict | None, status: RunStatus = RunStatus.SUCCEEDED
) -> RunSummary:
    at, candidates = START + number * NIGHT, (("a", verdict), ("b", verdict))
    named = candidates if verdict is not None else ()
    return RunSummary(f"r{number}", "c", status, verdict, at, at, "s", 1, named, 0, None)


def recent(number: int, *values: float | str, floor: float | None = None) -> RecentRun:
    lines = tuple(
        Headline(
            name,
            None if isinstance(value, str) else value,
            value if isinstance(value, str) else "finite",
            None,
            Verdict.PASS,
        )
        for name, value in zip("ab", values, strict=False)
    )
    return RecentRun(f"r{number}", START + number * NIGHT, lines, floor)


def state(**given: Any) -> CheckState:
    fields: dict[str, Any] = {
        "check": "c", "config": CONFIG, "in_use": True, "newest": run(2, Verdict.PASS),
        "decided": run(2, Verdict.PASS), "since": START, "last_success_at": START,
        "unhealthy_runs": 0, "pause": None, "quarantined_at": None, "timetable": None,
        "unended": (), "alerts": OpenAlerts(), "recent": (), "baseline_run_id": None,
        "baseline": {},
    }  # fmt: skip
    return CheckState(**fields | {"latest": given.get("newest", fields["newest"])} | given)


def test_failed_run_is_trouble_not_a_verdict() -> None:
    """Catches a monitor's crash that hides the last verdict, or looks like a regression."""
    failed = run(3, None, RunStatus.TIMED_OUT)
    found = summarize(state(newest=failed))

    assert found.trouble == failed
    assert found.decided is not None
    assert found.decided.verdict is Verdict.PASS


def test_a_run_that_a_person_cancelled_is_no_trouble() -> None:
    """Catches "no result lately" after a cancelled run, and a crash that one hides."""
    cancelled, failed = run(4, None, RunStatus.CANCELLED), run(3, None, RunStatus.FAILED)
    calm = summarize(state(newest=cancelled, latest=run(2, Verdict.PASS)))
    crashed = summarize(state(newest=cancelled, latest=failed))
    alone = summarize(state(newest=cancelled, latest=None, decided=None))

    assert (calm.newest, calm.trouble, calm.unfinished) == (cancelled, None, cancelled)
    assert (crashed.trouble, crashed.unfinished) == (failed, failed)
    assert summarize(state()).unfinished is None
    assert alone.trouble == cancelled, "nothing was ever measured"
    assert headline([calm]) == "All checks pass"
    assert counts([calm]) == "1 check"
    assert counts([crashed]) == "1 check, 1 with no result lately"


def test_worst_check_is_first() -> None:
    """Catches an overview in alphabetical order."""
    found = [
        summarize(state(check="a")),
        summarize(state(check="b", newest=run(1, None, RunStatus.FAILED), decided=None)),
        summarize(state(check="c", decided=run(2, Verdict.REGRESSION))),
        summarize(state(check="d", decided=run(2, Verdict.WARN))),
        summarize(state(check="e", newest=None, decided=None, since=None)),
    ]
    assert [s.check for s in sorted(found, key=lambda s: s.order)] == ["c", "b", "e", "d", "a"]


def test_trend_has_a_gap_where_a_run_failed() -> None:
    """Catches values that slide to another night, and NaN that becomes a gap."""
    found = summarize(state(recent=(recent(1, 0.5, 1.0), recent(2), recent(3, "nan", "posinf"))))
    first, second = found.trends

    assert first.values[:2] == [0.5, None]
    assert math.isnan(first.values[2] or 0)
    assert second.values == [1.0, None, math.inf]
    assert len(first.values) == 3


def test_a_check_that_never_ran_has_its_configured_candidates() -> None:
    """Catches a new check that is missing from the overview, or breaks it."""
    found = summarize(state(newest=None, decided=None, since=None))
    assert (found.candidates, found.trouble, found.tags) == (("a", "b"), None, ("team", "nightly"))


@pytest.mark.parametrize(
    ("config", "floor", "half"),
    [
        pytest.param({}, None, 5e-4, id="default least effect"),
        pytest.param({"rules": [{"name": "baseline-kl", "min_effect": 0.1}]}, 1e-3, 0.1, id="check's"),
        pytest.param({"rules": [{"name": "baseline-kl", "min_effect": 0.1}]}, 0.1, 0.3, id="noise"),
        pytest.param(
            {"candidates": [{"name": "a", "rules": [{"name": "baseline-kl", "min_effect": 0.2}]}]},
            None, 0.2, id="candidate's own",
        ),
    ],
)  # fmt: skip
def test_band_is_what_the_rule_allows(config: Any, floor: float | None, half: float) -> None:
    """Catches a noise band that is drawn narrower or wider than the rule judges."""
    known = {
        "a": Headline("a", 1.0, "finite", None, None),
        "b": Headline("b", None, "nan", None, None),
    }
    runs = (recent(1, 1.0, floor=floor),)
    first, second = summarize(state(config=config, baseline=known, recent=runs)).bands

    assert first is not None
    assert (first.low, first.baseline, first.high) == pytest.approx((1 - half, 1.0, 1 + half))
    assert second is None, "a baseline that is not finite bounds nothing"


def test_who_runs_and_who_waits() -> None:
    """Catches a queued run that is shown as one under way."""
    empty = UnendedRun(
        "r", "c", RunStatus.QUEUED, None, 0, 0, "manual", None, "cpu", 0, START, START, None, None, None
    )  # fmt: skip
    busy = replace(empty, run_id="s", status=RunStatus.MEASURING, tokens_done=5, tokens_total=9)
    found = summarize(state(unended=(empty, busy)))

    assert found.under_way == busy
    assert found.num_waiting == 1


ENVIRONMENT: dict[str, Any] = {"libraries": {"torch": "2.12"}, "gpus": [{"driver": "575"}]}


def mark(number: int, verdict: Verdict | None = Verdict.PASS, **given: Any) -> RunMark:
    at = START + number * NIGHT
    status = RunStatus.FAILED if verdict is None else RunStatus.SUCCEEDED
    candidate = CandidateMark("a", verdict, {"weights_sha": "w"}, "aten", 4.25, 100)
    fields: dict[str, Any] = {
        "run_id": f"r{number}", "status": status, "verdict": verdict, "reason": None,
        "started_at": at, "finished_at": at, "trigger": "schedule", "parent_run_id": None,
        "baseline_run_id": None, "num_alerts": 0, "measured": {"suite_hash": "s"},
        "environment": ENVIRONMENT, "reference": {"weights_sha": "r"},
        "candidates": () if verdict is None else (candidate,),
    }  # fmt: skip
    return RunMark(**fields | given)


def test_changes_are_between_runs_with_results() -> None:
    """Catches a new driver that is lost in a failed night, and one that is told every night."""
    other = {"libraries": {"torch": "2.13"}, "gpus": [{"driver": "580"}], "cpu": {"threads": 8}}
    found = changes(
        [mark(1), mark(2), mark(3, None, environment={}, reference=None), mark(4, environment=other),
         mark(5, environment=dict(other))]
    )  # fmt: skip

    assert [(c.run_id, c.candidate) for c in found] == [("r4", None)]
    assert [r["part"] for r in found[0].records] == ["library", "driver", "threads"]
    assert found[0].records[1] == {
        "name": "environment.gpus.0.driver", "part": "driver", "value": "580", "baseline": "575"
    }  # fmt: skip
    assert found[0].records[2]["baseline"] == "absent"


def test_new_weights_belong_to_their_candidate() -> None:
    """Catches a changed candidate that looks like a changed reference, and one that failed to load."""
    new = CandidateMark("a", Verdict.PASS, {"weights_sha": "x"}, "aten", 4.25, 100)
    gone = CandidateMark("a", None, None, None, None, None)
    found = changes(
        [mark(1), mark(2, candidates=(gone,)), mark(3, candidates=(new,), reference={"weights_sha": "q"})]
    )  # fmt: skip

    assert [(c.run_id, c.candidate, {r["part"] for r in c.records}) for c in found] == [
        ("r3", None, {"reference"}),
        ("r3", "a", {"weights"}),
    ]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (("lens_kl", "layers.3", "mean"), [("layer-kl", 0.15, Severity.CRITICAL)]),
        (("lens_kl", "layers.3", "p99"), []),
        (("lens_kl", "layers.3.mlp", "mean"), []),
        (("top1_agreement", "model", "mean"), [("top1-agreement", 0.9, Severity.CRITICAL)]),
        (("logit_kl", "model", "mean"), []),
    ],
    ids=str,
)
def test_limits_are_those_of_the_rules(shown: tuple[str, str, str], expected: list[Any]) -> None:
    """Catches a threshold line that no rule has, and a rule without its line."""
    found = limits(CONFIG, "a", *shown)
    assert found is not None
    assert [(limit.rule, limit.value, limit.severity) for limit in found] == expected


def test_limits_of_an_unreadable_configuration_are_unknown() -> None:
    """Catches an old configuration that breaks the page, or seems to have no rules."""
    assert limits({"candidates": "?"}, "a", "lens_kl", "layers.3", "mean") is None


def test_the_best_are_those_that_nobody_beats() -> None:
    """Catches a Pareto front with a candidate that is both larger and worse than another."""
    sizes = {"a": 8.0, "b": 4.0, "c": 8.5, "d": 3.0, "e": None}
    values = {"a": 0.01, "b": 0.1, "c": 0.02, "d": None, "e": 0.5}
    marked = tuple(
        CandidateMark(name, Verdict.PASS, {}, "aten", bits, None) for name, bits in sizes.items()
    )
    points = [
        SeriesPoint("r1", START, name, value, "finite" if value else "nan", None)
        for name, value in values.items()
    ]
    found = tradeoffs(mark(1, candidates=marked), points)

    assert [(t.candidate, t.index, t.is_best) for t in found] == [
        ("a", 0, True), ("b", 1, True), ("c", 2, False), ("d", 3, False),
    ]  # fmt: skip
    assert (found[3].value, found[3].kind) == (None, "nan")
