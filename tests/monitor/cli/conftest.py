"""The command line as it is called, with a real store and a pipeline that measures nothing."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from quantwatch import pipeline
from quantwatch.cli import main
from quantwatch.domain import CandidateResult, Progress, RunResult
from quantwatch.pipeline import Estimate, RunRequest
from quantwatch.store import runs
from quantwatch.telemetry import new_run_id

CONFIG = """
schema_version = 1
[checks.nightly]
description = "a check"
suite = "core-v1:demo"
reference = { model = "smollm2-135m" }
candidates = [{ name = "int8", model = "smollm2-135m", recipe = "int8-channel" }]
"""


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


def _load(name: str) -> ModuleType:
    """Load the builders of the report tests: tests are no package, so there is no import for it."""
    path = Path(__file__).parents[1] / "report" / "conftest.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Results: Any = _load("report_builders").Results


@pytest.fixture
def make() -> Any:
    return Results


@dataclass
class FakePipeline:
    """Takes requests, returns the candidates it was given, or raises; stores like the real one."""

    candidates: tuple[CandidateResult, ...] = (Results.candidate(),)
    changes: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    expected: Estimate = field(
        default_factory=lambda: Estimate(1_000_000_000, 8_000_000_000, 3900, 100.0)
    )
    estimated: list[RunRequest] = field(default_factory=list)
    requests: list[RunRequest] = field(default_factory=list)
    databases: list[Any] = field(default_factory=list)

    def estimate(self, request: RunRequest) -> Estimate:
        self.estimated.append(request)
        return self.expected

    def run_check(self, request: RunRequest, *, database: Any, progress: Progress) -> RunResult:
        self.requests.append(request)
        self.databases.append(database)
        progress.start("measure", 3900)
        progress.advance(3900)
        if self.error is not None:
            raise self.error
        config = request.check.model_dump(mode="json")
        result: RunResult = Results.run(*self.candidates, check=request.name, config=config)
        result = replace(result, run_id=new_run_id(), **self.changes)
        if database is not None:
            runs.begin_run(
                database,
                run_id=result.run_id,
                check=result.check,
                config=config,
                started_at=result.started_at,
            )
            runs.finish_run(database, result, None, ())
        return result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    stand_in = FakePipeline()
    monkeypatch.setattr(pipeline, "estimate", stand_in.estimate)
    monkeypatch.setattr(pipeline, "run_check", stand_in.run_check)
    monkeypatch.setattr(pipeline, "look_up_named", lambda _: None)
    return stand_in


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and folder with one configuration; nothing outside it is touched."""
    for variable in ("QUANTWATCH_DATABASE_URL", "QUANTWATCH_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    (tmp_path / "quantwatch.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("Some text to measure on.")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(place: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Call `quantwatch` with these words and return exit code, stdout and stderr."""

    def call(*words: str) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capfd.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return call
