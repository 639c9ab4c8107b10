"""Canaries from a queued run to the alert: found, missed, not measurable, and never in the way."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import select, text, update
from tests.monitor.tiny_models import llama, save_word_model

from quantwatch.alerts.sighting import sighting
from quantwatch.config.canary import CanaryConfig
from quantwatch.config.schema import CheckConfig, Config
from quantwatch.domain import Canary, RunResult, RunStatus
from quantwatch.errors import RunStoppedError
from quantwatch.models.loading import from_module
from quantwatch.pipeline import canary as canaries_of_runs
from quantwatch.pipeline.canary import _Flight, carry_canary
from quantwatch.pipeline.canary_judge import Night
from quantwatch.pipeline.holding import Silent
from quantwatch.pipeline.measure import Models
from quantwatch.pipeline.request import RunRequest
from quantwatch.store import baselines, canaries, clock, leases, queue, runs
from quantwatch.store.attempts import WorkerId
from quantwatch.store.canaries import Due
from quantwatch.store.reaper import reap
from quantwatch.store.session import Database
from quantwatch.store.tables import AlertRow, EventRow, RunRow
from quantwatch.worker.hooks import settling
from quantwatch.worker.performing import Surroundings, perform

WORDS = [f"w{i}" for i in range(96)]
CANARY = {"every": "1s", "size": 0.25, "fault": "scale", "of": "candidate"}
INT8 = {"name": "c", "model": "tiny", "recipe": "int8-channel"}
ONLY = [
    {"name": "isolated-error-outlier", "enabled": False},
    {"name": "baseline-kl", "enabled": False},
    {"name": "baseline-top1-agreement", "enabled": False},
]


class Nights:
    """A check in service, whose runs are queued and carried out one by one."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder, self.db, self.count = folder, database, 0

    def check(self, **settings: Any) -> CheckConfig:
        made = {
            "reference": {"model": "tiny"},
            "candidates": [{"name": "c", "model": "tiny"}],
            "suite": {"files": ["prompts.json"]},
            "threads": 1,
            "lens_positions": 0,
            "isolated_fraction": 0.9,
            "schedule": {"cron": "0 2 * * *", "attempts": 3},
            "alerting": {"confirm": False},
            "canary": CANARY,
        }
        return CheckConfig.model_validate({**made, **settings})

    def queue(self, check: CheckConfig) -> None:
        self.count += 1
        slot = f"s:2026-11-{self.count:02}T02:00:00Z"
        new = queue.NewRun.of("nightly", check, str(self.folder), slot, trigger="schedule")
        with self.db.writer() as session:
            assert queue.enqueue(session, new) is not None

    def claim(self) -> leases.Claim:
        with self.db.writer() as session:
            found = leases.claim(session, WorkerId.here("w"), ["cpu"])
        assert found is not None
        return found

    def surroundings(self, check: CheckConfig) -> Surroundings:
        endpoint = {"ops": {"url": "https://ops.example/hook"}}
        service = Config.model_validate(
            {"schema_version": 1, "checks": {"nightly": check}, "endpoints": endpoint}
        )
        roots = (self.folder,)
        return Surroundings(self.folder / "cache", roots, settle=settling(service))

    def night(self, **settings: Any) -> tuple[RunResult, Canary | None]:
        check = self.check(**settings)
        self.queue(check)
        claim = self.claim()
        perform(self.db, claim, self.surroundings(check))
        # The next one is due: a day has passed.
        self.db.clock_shift += timedelta(days=1)
        found = canaries.canary_of_run(self.db, claim.run_id)
        return runs.get_result(self.db, claim.run_id), found

    def alert(self) -> str | None:
        with self.db.reader() as session:
            return session.scalar(select(AlertRow.state).where(AlertRow.rule == "canary"))

    def told(self) -> list[str]:
        with self.db.reader() as session:
            return list(session.scalars(select(EventRow.type).order_by(EventRow.occurred_at)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, among whose medians one fault is one of many, and sixteen prompts."""
    folder = tmp_path_factory.mktemp("deeper")
    save_word_model(folder / "tiny", len(WORDS), scale=5.0, num_hidden_layers=4)
    texts = [" ".join(WORDS[(i * 5) % 70 : (i * 5) % 70 + 6 + i]) for i in range(16)]
    (folder / "prompts.json").write_text(json.dumps(texts))
    return folder


@pytest.fixture
def nights(folder: Path, database: Database) -> Nights:
    return Nights(folder, database)


FOUND = [
    # fault, settings of the canary, other settings
    ("scale", {}, {}),
    ("channel", {"prompts": "all"}, {}),
    ("layer", {"of": "reference"}, {"candidates": [INT8]}),
]


@pytest.mark.parametrize(("fault", "canary", "settings"), FOUND, ids=[f[0] for f in FOUND])
def test_found_and_located(
    nights: Nights, fault: str, canary: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Catches a fault that is seen in another place, and a run that bears its marks."""
    run, found = nights.night(canary={**CANARY, "fault": fault, **canary}, **settings)
    assert found is not None
    assert (found.state, found.found, found.located) == ("measured", True, True), found
    assert found.place is not None
    assert found.named is not None
    assert found.named.startswith(found.place)
    assert found.value is not None
    assert found.threshold is not None
    assert found.value > found.threshold > 0
    assert (found.size, found.turn, found.candidate) == (0.25, 0, "c")
    assert (found.channel is not None) == (fault == "channel")
    assert (run.status, run.alerts) == (RunStatus.SUCCEEDED, ())
    assert nights.alert() == "inactive"


@pytest.mark.slow
def test_missed_told_and_found_again(nights: Nights) -> None:
    """Catches a blind monitor of which nobody hears, a regression made of it, and no end to it.

    A hundredth of a percent over INT8 is less than the rule's smallest effect.
    """
    settings: dict[str, Any] = {"candidates": [INT8], "rules": ONLY}
    first, missed = nights.night(canary={**CANARY, "size": 1e-4}, **settings)
    assert missed is not None
    assert (missed.state, missed.found, missed.located) == ("measured", False, False)
    assert missed.reason.startswith(f"isolated error at {missed.place}: ")
    assert nights.alert() == "firing"
    assert first.verdict == "pass"
    assert nights.told() == ["alert.firing"]
    baselines.pin(nights.db, "nightly", first.run_id)
    same, again = nights.night(canary={**CANARY, "size": 1e-4}, **settings)
    assert again is not None
    assert (again.found, again.turn, nights.alert()) == (False, 1, "firing")
    assert nights.told() == ["alert.firing"]
    _, found = nights.night(**settings)
    assert found is not None
    assert (found.found, found.located) == (True, True), found
    assert found.rule == "baseline-isolated-error"
    assert nights.alert() == "inactive"
    assert nights.told() == ["alert.firing", "alert.resolved"]
    assert {first.verdict, same.verdict} == {"pass"}
    nights.night(canary={**CANARY, "size": 1e-4}, **settings)
    assert nights.alert() == "firing"
    run, off = nights.night(canary=None, **settings)
    assert (off, run.verdict, nights.alert()) == (None, "pass", "inactive")


def plain(database: Database) -> dict[str, list[Any]]:
    """Every table's rows but for canaries, without ids and times that differ by themselves."""
    queries = {
        "measurement": "SELECT scope_id, metric_id, n, mean, se, p99, max FROM measurement",
        "noise_floor": "SELECT scope_id, metric_id, value FROM noise_floor",
        "block": "SELECT kind, metric_id, prompt, sha256 FROM block",
        "candidate": "SELECT name, verdict, culprit, bit_equal, variant_details FROM run_candidate",
        "detectable": 'SELECT rule, scope, expected, "limit", value, reason FROM detectable',
        "alert": "SELECT candidate, rule, state, num_breaches FROM alert WHERE rule <> 'canary'",
        "scopes": "SELECT idx, scope_id, value, threshold, words FROM alert_scope",
        "evaluation": "SELECT outcome, value, threshold FROM rule_evaluation",
        "run": "SELECT verdict, num_alerts, baseline_run_id IS NULL, capture_sha FROM run",
        "point": "SELECT idx, candidate, verdict, value, kind FROM recent_point",
        "latest": "SELECT run_id IS NULL, verdict_since IS NULL FROM latest_run",
        "check": 'SELECT unhealthy_runs, last_success_at IS NULL FROM "check"',
    }
    with database.reader() as session:
        return {
            name: sorted(map(tuple, session.execute(text(query))), key=repr)
            for name, query in queries.items()
        }


@pytest.mark.slow
def test_the_run_does_not_know_of_it(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, migrated_file: Path, tmp_path: Path
) -> None:
    """Catches a verdict, a baseline, a trend or a single bit that is another because of a canary.

    The same two nights, a pinned one and one that is worse than it, with canaries and without.
    """
    from quantwatch.store.session import open_database

    other = tmp_path / "without.db"
    other.write_bytes(migrated_file.read_bytes())
    without = Nights(nights.folder, open_database(f"sqlite:///{other}"))
    fault = {"scope": "layers.0.mlp.down_proj", "scale": 1.5}
    worse = {"name": "c", "model": "tiny", "faults": [fault]}
    for each in (nights, without):
        if each is without:
            monkeypatch.setattr(canaries, "due", lambda *_: None)
        # Runs seed the resampling of their own intervals by their ids.
        ids = iter(["01FIRST", "01SECOND"])
        monkeypatch.setattr(queue, "new_run_id", lambda ids=ids: next(ids))
        first, one = each.night()
        baselines.pin(each.db, "nightly", first.run_id)
        second, two = each.night(candidates=[worse])
        assert (first.verdict, second.verdict) == ("pass", "regression")
        assert ((one is None), (two is None)) == ((each is without),) * 2
    assert plain(nights.db) == plain(without.db)
    without.db.close()


def test_without_a_fault_it_is_the_night_itself(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a copy measured in other batches or at other tokens: its noise would look like faults."""
    seen: list[Any] = []

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield None

    def spy(place: Any, planted: Any, control: Any, counts: Any) -> Any:
        seen.append((planted, control))
        return sighting(place, planted, control, counts)

    monkeypatch.setattr(canaries_of_runs, "planted", nothing)
    monkeypatch.setattr(canaries_of_runs, "sighting", spy)
    first, _ = nights.night(candidates=[INT8], isolated_fraction=0.5, lens_positions=8)
    baselines.pin(nights.db, "nightly", first.run_id)
    _, found = nights.night(candidates=[INT8], isolated_fraction=0.5, lens_positions=8)
    for planted, control in seen:
        ours = {(m.metric, m.scope): m for m in planted.result.measurements}
        theirs = {(m.metric, m.scope): m for m in control.result.measurements}
        assert ours.keys() == theirs.keys()
        for key, row in ours.items():
            # What the mean was taken over is said of the suite; prompts of the night are more.
            assert replace(row, method="") == replace(theirs[key], method=""), key
        assert planted.alerts == control.alerts
        assert planted.result.culprit == control.result.culprit
    assert len(seen) == 2
    assert found is not None
    assert found.found is False


LATE = {
    "prefill_chunk": 4,
    "suite": {"files": ["prompts.json"], "score_start": 5},
}
WHY_NOT = [
    # name, settings, canary, said
    ("streamed", {"memory": "streamed"}, {}, "streamed"),
    ("nothing isolated", {"isolated_fraction": 0.0}, {}, "isolated_fraction = 0"),
    ("no such place", {}, {"scope": "layers.7"}, "no linear layer of this model"),
    ("rounded away", {}, {"size": 1e-9}, "rounds it away"),
    ("the first chunk isn't scored", LATE, {}, "no isolated error is measured"),
]


@pytest.mark.parametrize(
    ("settings", "canary", "said"), [w[1:] for w in WHY_NOT], ids=[w[0] for w in WHY_NOT]
)
def test_not_measurable(
    nights: Nights, settings: dict[str, Any], canary: dict[str, Any], said: str
) -> None:
    """Catches a run that fails for its canary, and silence about one that there was not."""
    run, found = nights.night(canary={**CANARY, **canary}, **settings)
    assert run.status is RunStatus.SUCCEEDED
    assert found is not None
    assert (found.state, found.found, found.located) == ("not measurable", None, None)
    assert said in found.reason
    assert nights.alert() in (None, "inactive")


def test_judged_by_the_baseline_of_its_night(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a canary compared with a run that was pinned after its night was judged."""
    settings: dict[str, Any] = {"candidates": [INT8], "rules": ONLY}
    first, _ = nights.night(canary=None, **settings)
    real = canaries.due

    def pin_first(*given: Any) -> Any:
        baselines.pin(nights.db, "nightly", first.run_id)
        return real(*given)

    monkeypatch.setattr(canaries, "due", pin_first)
    run, found = nights.night(**settings)
    assert run.baseline_run_id is None
    assert found is not None
    assert (found.state, found.found) == ("measured", False), found
    run, found = nights.night(**settings)
    assert run.baseline_run_id == first.run_id
    assert found is not None
    assert (found.found, found.rule) == (True, "baseline-isolated-error"), found


def test_only_places_with_an_isolated_error_are_planted_in(nights: Nights) -> None:
    """Catches a fault where nothing is measured, which is then called missed."""
    rotated = {"weights": "int8", "granularity": "channel", "rotation": {}}
    places = set()
    for _ in range(3):
        _, found = nights.night(candidates=[{"name": "c", "model": "tiny", "recipe": rotated}])
        assert found is not None
        assert "not measured" not in (found.reason or "")
        places.add(str(found.place).rsplit(".", 1)[-1])
    assert places <= {"o_proj", "down_proj"}


def test_without_a_local_candidate_there_is_nothing_to_plant_in(nights: Nights) -> None:
    """Catches a night that fails for its canary, measured and judged as it was."""
    measured = SimpleNamespace(models=SimpleNamespace(candidates={}), timings_s={})
    request = RunRequest("nightly", nights.check(), nights.folder, nights.folder)
    result = SimpleNamespace(finished_at=datetime.now(UTC), candidates=())
    night = Night(request, cast(Any, measured), cast(Any, result), None)
    assert request.check.canary is not None
    found = carry_canary(night, request.check.canary, Due(0, "s", None), Silent())
    assert (found.candidate, found.state) == ("c", "not measurable")
    assert "no candidate is loaded here" in str(found.reason)


def test_masked_by_what_is_there_already(nights: Nights) -> None:
    """Catches a monitor called blind because the place is broken anyhow."""
    broken = [{"scope": "layers.1.mlp.down_proj", "scale": 3.0}]
    run, found = nights.night(
        candidates=[{"name": "c", "model": "tiny", "faults": broken}],
        canary={**CANARY, "scope": "layers.1.attention", "size": 0.01},
    )
    assert run.verdict == "regression"
    assert found is not None
    assert found.state == "not measurable"
    assert "breaches at layers.1 without it" in found.reason


@pytest.mark.parametrize("error", [MemoryError("all of it"), OSError(28, "full")])
def test_whatever_is_raised_the_run_ends(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Catches results of hours that are lost because the canary could not be measured."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(canaries_of_runs, "measure_models", fail)
    run, found = nights.night()
    assert (run.status, run.verdict) == (RunStatus.SUCCEEDED, "pass")
    assert found is not None
    assert found.state == "not measurable"
    assert type(error).__name__ in found.reason
    assert found.place is not None


def test_a_cancelled_run_is_cancelled(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wish to stop that is taken for a canary's trouble."""

    def stop(*_: Any) -> None:
        raise RunStoppedError("cancelled", "user")

    monkeypatch.setattr(canaries_of_runs, "measure_models", stop)
    run, found = nights.night()
    assert (run.status, found) == (RunStatus.CANCELLED, None)


def test_no_time_left(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that its canary drives past the deadline."""
    real = canaries.due

    def late(*given: Any) -> Any:
        due = real(*given)
        return None if due is None else replace(due, left_s=0.001)

    monkeypatch.setattr(canaries, "due", late)
    run, found = nights.night()
    assert run.status is RunStatus.SUCCEEDED
    assert found is not None
    assert "before the run's deadline" in found.reason


def test_modules_that_the_reference_runs_too_are_not_planted_in() -> None:
    """Catches a fault in both models at once, which nobody can see."""
    one = from_module("reference", llama(96))
    shared, alone = replace(one), from_module("c", llama(96))
    for candidate, is_own in ((shared, False), (alone, True)):
        models = Models(one, {"c": candidate}, {}, {})
        night: Any = SimpleNamespace(measured=SimpleNamespace(models=models), name="c")
        flight = _Flight(night, CanaryConfig(of="candidate"), Due(0, "s", None), SimpleNamespace())
        assert (flight._carrier().module is candidate.module) == is_own
        copied = _Flight(night, CanaryConfig(of="reference"), Due(0, "s", None), flight.progress)
        assert copied._carrier().module is not one.module


DYING = """
import os, signal, sys
from tests.monitor.pipeline.test_canary import die_in_canary
die_in_canary(*sys.argv[1:])
"""


def die_in_canary(url: str, folder: str) -> None:
    """Carry out the queued run in this process, which dies while the fault is planted."""
    from quantwatch.store.session import open_database

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(canaries_of_runs, "measure_models", die)  # noqa: B010 - not exported
    nights = Nights(Path(folder), open_database(url))
    perform(nights.db, nights.claim(), nights.surroundings(nights.check()))


@pytest.mark.slow
def test_killed_in_a_canary(nights: Nights) -> None:
    """Catches a check that its canary kills night after night, and a half-written one."""
    nights.queue(nights.check())
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", DYING, nights.db.url, str(nights.folder)]
    died = subprocess.run(
        command,
        cwd=root,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert died.returncode == -signal.SIGKILL
    with nights.db.writer() as session:
        assert session.scalar(text("SELECT count(*) FROM canary")) == 0
        session.execute(update(RunRow).values(lease_until=clock.now(session) - timedelta(hours=1)))
    reap(nights.db)
    nights.db.clock_shift += timedelta(hours=1)
    claim = nights.claim()
    assert claim.attempt == 2
    perform(nights.db, claim, nights.surroundings(nights.check()))
    run = runs.get_result(nights.db, claim.run_id)
    found = canaries.canary_of_run(nights.db, claim.run_id)
    assert (run.status, run.verdict) == (RunStatus.SUCCEEDED, "pass")
    assert found is not None
    assert (found.state, found.turn) == ("not measurable", 0)
    assert "attempt 2" in found.reason
