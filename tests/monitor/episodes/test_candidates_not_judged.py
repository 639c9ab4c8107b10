"""Nights on which one candidate, or the reference, can't be judged while the check succeeds."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.monitor.tiny_models import save_word_model

from quantwatch.config.default_rules import DEFAULT_RULES
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunResult, Verdict
from quantwatch.pipeline import RunRequest, run_check
from quantwatch.pipeline.alerting import settler
from quantwatch.store import baselines
from quantwatch.store.session import Database

Service = Any
FIRST, RESOLVED = ("alert.firing", "first"), ("alert.resolved", "resolved_all")
WORDS = [f"w{i}" for i in range(16)]
FAULT = {"scope": "layers.1.mlp.down_proj", "scale": 5.0}
NAN = {"scope": "layers.1.mlp.up_proj", "nan_at": [0, 0]}
OFF = [{"name": r.name, "enabled": False} for r in DEFAULT_RULES if r.name != "nonfinite"]
RULES = [
    *OFF,
    {"name": "kl", "metric": "logit_kl", "threshold": 1e-4},
    {"name": "moved", "metric": "logit_kl", "kind": "baseline", "min_effect": 1e-6},
]


class Quiet:
    """A progress that says nothing."""

    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and four prompts."""
    folder = tmp_path_factory.mktemp("models")
    save_word_model(folder / "tiny", len(WORDS), scale=5.0)
    texts = [" ".join(WORDS[(i * 5) % 9 : (i * 5) % 9 + 6]) for i in range(4)]
    (folder / "prompts.json").write_text(json.dumps(texts))
    return folder


@pytest.fixture
def service(sqlite_db: Database, make_service: Callable[..., Service]) -> Service:
    """A check on SQLite alone: measuring takes its time, and no SQL is tried here."""
    return make_service(sqlite_db, {"confirm": False})


def night(service: Service, folder: Path, model: str = "tiny", **changes: Any) -> RunResult:
    """Measure two candidates and settle: `int8` has a fault and may be gone, `int4` is equal."""
    candidates = [
        {"name": "int8", "model": model, "faults": [FAULT]},
        {"name": "int4", "model": "tiny"},
    ]
    service.check = {
        "reference": {"model": "tiny"}, "candidates": candidates, "rules": RULES, "threads": 1,
        "suite": {"files": ["prompts.json"]}, "schedule": None, **changes,
    }  # fmt: skip
    check: CheckConfig = service.settings
    request = RunRequest("nightly", check, folder, folder / "cache")
    then = settler(check, service.config)
    run = run_check(request, database=service.db, progress=Quiet(), then=then)
    service.watch()
    return run


def test_a_candidate_that_fails_to_load_is_told_of(service: Service, folder: Path) -> None:
    """Catches a deleted candidate of a check that succeeds with the other one: its alert stays open
    for ever and nobody hears that nothing watches it."""
    night(service, folder)
    assert (service.state("kl"), service.heard()) == ("firing", [FIRST])
    run = night(service, folder, "./gone")
    assert run.verdict == Verdict.PASS
    assert (service.state("kl"), service.state("not-measured")) == ("firing", "pending")
    assert service.heard() == [FIRST]
    night(service, folder, "./gone")
    assert (service.state("kl"), service.state("not-measured")) == ("inactive", "firing")
    ended, began = service.bodies()[1:]
    assert ended["data"]["alerts"][0]["resolve_reason"] == "series_missing"
    [member] = began["data"]["alerts"]
    assert (member["rule"], member["severity"], member["num_runs"]) == (
        "not-measured",
        "warning",
        2,
    )
    assert "could not be measured:" in member["words"]
    assert "gone" in member["words"]
    assert began["data"]["candidate"] == "int8"
    assert service.state("not-measured", "int4") == "inactive"


def test_a_candidate_that_is_back_is_told_of(service: Service, folder: Path) -> None:
    """Catches a warning that stays open, and one bad night that is told."""
    night(service, folder, "./gone")
    night(service, folder)
    assert service.heard() == [FIRST]
    for model in ("./gone", "./gone", "tiny"):
        night(service, folder, model)
    told = [
        (body["type"], one["rule"], one["resolve_reason"])
        for body in service.bodies()[1:]
        for one in body["data"]["alerts"]
    ]
    assert told == [
        ("alert.resolved", "kl", "series_missing"),
        ("alert.firing", "not-measured", None),
        ("alert.resolved", "not-measured", "recovered"),
        ("alert.firing", "kl", None),
    ]


def test_patience_is_the_checks_own(service: Service, folder: Path) -> None:
    """Catches a limit that `alerting.unhealthy_runs` doesn't set."""
    service.alerting = {"confirm": False, "unhealthy_runs": 1}
    night(service, folder, "./gone")
    assert service.state("not-measured") == "firing"


def test_a_reference_that_is_not_finite_is_told_of(service: Service, folder: Path) -> None:
    """Catches a NaN reference: every candidate inconclusive, no rule judged, and silence."""
    broken = {"model": "tiny", "faults": [NAN]}
    for _ in range(2):
        run = night(service, folder, reference=broken)
        assert (run.verdict, run.alerts) == (Verdict.INCONCLUSIVE, ())
    assert {one.outcome for one in run.outcomes if one.rule != "not-measured"} == {"missing"}
    assert [service.state("not-measured", name) for name in ("int8", "int4")] == ["firing"] * 2
    words = {body["data"]["alerts"][0]["words"] for body in service.bodies()}
    [said] = words
    assert said.startswith("The reference itself is not finite, first at layers.1.mlp")


def test_a_baseline_that_measured_something_else_is_told_of(service: Service, folder: Path) -> None:
    """Catches rules of kind baseline that judge nothing any more, night after night."""
    first = night(service, folder)
    baselines.pin(service.db, "nightly", first.run_id, actor="ada")
    night(service, folder)
    assert service.state("not-compared") == "inactive"
    fewer: dict[str, Any] = {"suite": {"files": ["prompts.json"], "limit": 3}}
    for _ in range(2):
        run = night(service, folder, **fewer)
        assert run.verdict in (Verdict.INCONCLUSIVE, Verdict.REGRESSION)
    assert [service.state("not-compared", name) for name in ("int8", "int4")] == ["firing"] * 2
    told = [one for body in service.bodies() for one in body["data"]["alerts"]]
    [words] = {one["words"] for one in told if one["rule"] == "not-compared"}
    assert words.startswith("the baseline measured something else: ")
    assert "suite" in words
    night(service, folder, rules=RULES[:-1], **fewer)
    assert service.state("not-compared") == "inactive"


def test_the_end_of_a_run_is_by_the_clock_of_the_database(service: Service, folder: Path) -> None:
    """Catches a worker whose own clock decides whether the check lives."""
    service.db.clock_shift = timedelta(days=-400)
    run = night(service, folder)
    assert run.finished_at is not None
    assert run.finished_at < datetime.now(UTC) - timedelta(days=399)
