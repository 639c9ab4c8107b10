"""Runs against a baseline, from models to verdicts: paired by prompt, on a real database."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunResult, Verdict
from quantwatch.pipeline import RunRequest, run_check
from quantwatch.pipeline.rejudging import rejudge
from quantwatch.store import baselines, runs
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import RunRow

RULES = [
    {"name": "kl", "metric": "logit_kl", "kind": "baseline", "min_effect": 1e-6},
    {"name": "isolated-error-outlier", "enabled": False},
]


class Quiet:
    """A progress that says nothing."""

    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


def request_for(folder: Path, scale: float, **settings: Any) -> RunRequest:
    fault = {"scope": "layers.1.mlp.down_proj", "scale": scale}
    check = {
        "reference": {"model": "tiny"},
        "candidates": [{"name": "c", "model": "tiny", "faults": [fault]}],
        "suite": {"files": ["prompts.json"]},
        "threads": 1,
        "rules": RULES,
        **settings,
    }
    return RunRequest("nightly", CheckConfig.model_validate(check), folder, folder / "cache")


def night(folder: Path, database: Database | None, scale: float, **settings: Any) -> RunResult:
    request = request_for(folder, scale, **settings)
    return run_check(request, database=database, progress=Quiet())


@pytest.fixture(scope="module")
def pinned_file(
    folder: Path, migrated_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A database that holds a night of the scale 1.01, pinned: measured once, to be copied."""
    path = Path(shutil.copy(migrated_file, tmp_path_factory.mktemp("pinned") / "runs.db"))
    database = open_database(f"sqlite:///{path}")
    baselines.pin(database, "nightly", night(folder, database, 1.01).run_id)
    database.close()
    return path


@pytest.fixture
def pinned(pinned_file: Path, tmp_path: Path) -> Iterator[Database]:
    """Return a database of the test's own in which that night is pinned."""
    database = open_database(f"sqlite:///{shutil.copy(pinned_file, tmp_path / 'pinned.db')}")
    yield database
    database.close()


def record(run: RunResult, metric: str = "logit_kl", scope: str = "model") -> Any:
    (found,) = (
        each
        for each in run.candidates[0].baseline_differences
        if (each.get("metric"), each.get("scope")) == (metric, scope)
    )
    return found


def test_a_worse_candidate_is_a_regression_by_its_interval(
    folder: Path, database: Database
) -> None:
    """Catches a paired test that the pipeline never reaches."""
    first = night(folder, database, 1.01)
    baselines.pin(database, "nightly", first.run_id, actor="ada")
    same = night(folder, database, 1.01)
    assert (same.verdict, same.candidates[0].baseline_differences) == (Verdict.PASS, ())
    worse = night(folder, database, 1.05)
    assert worse.verdict == Verdict.REGRESSION
    (alert,) = (a for a in worse.alerts if a.rule == "kl")
    assert "95 % interval" in alert.words
    assert "over 16 prompts" in alert.words
    assert alert.value is not None
    assert alert.value > alert.threshold > 0
    kl = record(worse)
    assert 1e-6 < kl["ci_low"] < kl["difference"] < kl["ci_high"]
    assert max(kl["p"], kl["q"]) < 0.01
    assert kl["num_prompts"] == 16
    assert record(worse, "rel_error", "layers.1")["q"] is None
    outcome = next(each for each in worse.outcomes if each.rule == "kl")
    assert (outcome.outcome, outcome.threshold) == ("breach", alert.threshold)
    assert worse.capture["baseline"] == {"kind": "pinned", "runs": [first.run_id]}


def test_a_better_candidate_is_an_improvement(folder: Path, database: Database) -> None:
    """Catches praise by the point, and improvements that are never found."""
    baselines.pin(database, "nightly", night(folder, database, 1.05).run_id)
    assert night(folder, database, 1.01).verdict == Verdict.IMPROVEMENT


def test_too_few_prompts_decide_nothing(folder: Path, database: Database) -> None:
    """Catches a regression called on the spread of five numbers; no change is still a pass."""
    few = {"suite": {"files": ["prompts.json"], "limit": 5}}
    baselines.pin(database, "nightly", night(folder, database, 1.01, **few).run_id)
    assert night(folder, database, 1.01, **few).verdict == Verdict.PASS
    worse = night(folder, database, 1.05, **few)
    assert worse.verdict == Verdict.INCONCLUSIVE
    assert any("about 5 more prompts needed" in alert.words for alert in worse.alerts)


def test_a_rolling_baseline_needs_no_pin(folder: Path, database: Database) -> None:
    """Catches rolling runs that are chosen before the run knows what it measures."""
    rolling = {"baseline": {"kind": "rolling", "window": 2}}
    ids = [night(folder, database, 1.01, **rolling).run_id for _ in range(3)]
    worse = night(folder, database, 1.05, **rolling)
    assert worse.verdict == Verdict.REGRESSION
    assert worse.capture["baseline"] == {"kind": "rolling", "runs": [ids[2], ids[1]]}
    after = night(folder, database, 1.05, **rolling)
    assert after.capture["baseline"]["runs"] == [ids[2], ids[1]]


def test_a_confirmation_run_is_judged_with_the_run_it_confirms(
    folder: Path, pinned: Database
) -> None:
    """Catches a second look that forgets the first."""
    first = night(folder, pinned, 1.05)
    request = request_for(folder, 1.05)
    confirm = _run_as_confirmation(pinned, request, first.run_id)
    assert confirm.verdict == Verdict.REGRESSION
    # Deterministic models: the pooled mean is the mean, whatever the order of the two runs.
    assert record(confirm)["difference"] == pytest.approx(record(first)["difference"], rel=1e-9)


def _run_as_confirmation(database: Database, request: RunRequest, parent: str) -> RunResult:
    """Mark the run as soon as it begins, as the worker's queue does."""

    class Marking(Quiet):
        def start(self, stage: str, total_tokens: int) -> None:
            with database.writer() as session:
                session.execute(
                    update(RunRow)
                    .where(RunRow.status.in_(["preparing", "measuring"]))
                    .values(trigger="confirm", parent_run_id=parent)
                )

    return run_check(request, database=database, progress=Marking())


def test_the_floor_has_three_sources(folder: Path) -> None:
    """Catches conditions that are measured and not kept with the run."""
    run = night(folder, None, 1.01)
    assert set(run.capture["noise_floor_by_source"]) == {"reference", "threads", "attention"}
    assert run.capture["noise_floor_sources"] == {"threads": "measured", "attention": "measured"}
    for (metric, _), floor in run.noise_floor.items():
        sources = run.capture["noise_floor_by_source"].values()
        assert floor <= max(each.get(metric, 0.0) for each in sources)


def test_a_baseline_of_other_prompts_stays_inconclusive(folder: Path, pinned: Database) -> None:
    """Catches an incompatible pinned baseline that is passed over in silence."""
    other = night(folder, pinned, 1.01, suite={"files": ["prompts.json"], "limit": 12})
    assert other.verdict == Verdict.INCONCLUSIVE
    assert any("suite" in problem for problem in other.baseline_mismatch)


def test_a_baseline_from_a_file(folder: Path, database: Database) -> None:
    """Catches a run in CI that is compared by the point because the database isn't there."""
    first = night(folder, database, 1.01)
    request = replace(request_for(folder, 1.05), baseline=first)
    alone = run_check(request, database=None, progress=Quiet())
    assert alone.verdict == Verdict.REGRESSION
    stored = run_check(request, database=database, progress=Quiet())
    assert record(stored)["ci_low"] is not None


def _verdicts(run: RunResult) -> Any:
    """All that judging adds to a run, apart from when."""
    found = [(one.name, one.verdict, one.baseline_differences) for one in run.candidates]
    return run.verdict, found, run.alerts, run.baseline_run_id, run.baseline_mismatch


NAN = {"scope": "layers.1.mlp.down_proj", "nan_at": [0, 0]}
WORSE = {"scope": "layers.1.mlp.down_proj", "scale": 1.05}
NIGHTS: dict[str, dict[str, Any]] = {
    "worse": {"candidates": [{"name": "c", "model": "tiny", "faults": [WORSE]}]},
    "worse, rolling": {
        "candidates": [{"name": "c", "model": "tiny", "faults": [WORSE]}],
        "baseline": {"kind": "rolling"},
    },
    "a candidate that is NaN, one that fails to load": {
        "candidates": [
            {"name": "c", "model": "tiny", "faults": [NAN]},
            {"name": "d", "model": "./none"},
        ]
    },
    "a reference that is NaN": {"reference": {"model": "tiny", "faults": [NAN]}},
    "other prompts": {"suite": {"files": ["prompts.json"], "limit": 12}},
}


@pytest.mark.parametrize("settings", NIGHTS.values(), ids=NIGHTS)
def test_judged_from_the_store_as_from_memory(
    folder: Path, pinned: Database, settings: dict[str, Any]
) -> None:
    """Catches a second judgement that finds another verdict in the very same numbers."""
    live = night(folder, pinned, 1.01, **settings)
    check = request_for(folder, 1.01, **settings).check
    again = rejudge(pinned, runs.get_result(pinned, live.run_id), check)
    assert again.outcomes == live.outcomes
    assert _verdicts(again) == _verdicts(live)


def test_a_run_that_was_pinned_since_is_its_own_normal(folder: Path, pinned: Database) -> None:
    """Catches a regression that was accepted by pinning it and is found again in itself."""
    worse = night(folder, pinned, 1.05)
    baselines.pin(pinned, "nightly", worse.run_id)
    stored = runs.get_result(pinned, worse.run_id)
    again = rejudge(pinned, stored, request_for(folder, 1.05).check)
    assert (worse.verdict, again.verdict) == (Verdict.REGRESSION, Verdict.PASS)
    (outcome,) = (each for each in again.outcomes if each.rule == "kl")
    assert (outcome.outcome, again.baseline_run_id) == ("clear", worse.run_id)
