"""One claimed run from its stored configuration to its end; measuring is a stand-in."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text

from quantwatch.config.recipes import RecipeConfig, recipe_config
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunEvent, RunResult, RunStatus, Suite
from quantwatch.errors import (
    CaptureError,
    ConfigError,
    IncompatibleError,
    LeaseLostError,
    ModelError,
    PromptError,
    ResourceError,
    RunStoppedError,
    StoreError,
)
from quantwatch.observability import redaction
from quantwatch.pipeline.request import RunRequest
from quantwatch.store import leases
from quantwatch.store.attempts import list_attempts
from quantwatch.store.endings import Trouble
from quantwatch.store.leases import Claim
from quantwatch.store.runs import finish_run, get_result
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import Base
from quantwatch.worker.performing import Surroundings, perform

Queue = Callable[..., str]
Take = Callable[..., Claim]
Peek = Callable[..., Any]
Make = Callable[..., RunResult]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A check as it is kept with a run; its files lie in the test's folder."""
    (tmp_path / "prompts.txt").write_text("words")
    check = CheckConfig.model_validate(
        {
            "reference": {"model": "./tiny"},
            "candidates": [{"name": "same", "model": "./tiny"}],
            "suite": {"files": ["prompts.txt"]},
        }
    )
    return check.model_dump(mode="json")


@dataclass
class Measuring:
    """Stands in for the pipeline: raises what it is told to, else stores a result."""

    make: Make
    suite: Suite
    error: BaseException | None = None
    requests: list[RunRequest] = field(default_factory=list)
    before_end: Callable[[], object] = lambda: None

    def __call__(
        self, request: RunRequest, database: Database, claim: Claim, then: Any
    ) -> RunResult:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        leases.advance(database, claim, RunEvent.MEASURE)
        leases.advance(database, claim, RunEvent.FINALIZE)
        result = self.make(run_id=claim.run_id, check=claim.check)
        self.before_end()
        finish_run(database, result, self.suite, (), lease=claim.token, then=then)
        return result


@pytest.fixture
def measuring(make_result: Make, suite: Suite) -> Measuring:
    return Measuring(make_result, suite)


def around(tmp_path: Path, **known: Any) -> Surroundings:
    return Surroundings(tmp_path / "cache", **known)


def rows(db: Database, table: str) -> int:
    with db.reader() as session:
        return session.scalar(select(func.count()).select_from(Base.metadata.tables[table])) or 0


def test_a_run_as_it_was_asked_for(
    db: Database, queue: Queue, take: Take, *, config: Any, measuring: Measuring, tmp_path: Path
) -> None:
    """Catches a run by today's file instead of the configuration that was queued with it."""
    run_id = queue(config=config, base_dir=str(tmp_path))
    settled = []

    def settle(_: object, result: RunResult, check: CheckConfig) -> None:
        settled.append((result.run_id, check.candidates[0].name))

    perform(db, take(), around(tmp_path, settle=settle), measuring)

    (request,) = measuring.requests
    assert request.check.model_dump(mode="json") == config
    assert (request.name, request.base_dir) == ("nightly", tmp_path)
    assert settled == [(run_id, "same")]
    assert get_result(db, run_id).verdict == "regression"
    (attempt,) = list_attempts(db, run_id)
    assert attempt.outcome == "succeeded"
    assert attempt.peak_memory_bytes is not None
    assert attempt.peak_memory_bytes > 10_000_000
    assert attempt.gpus


ERRORS = [
    (StoreError("locked"), "queued", "storage_error"),
    (ResourceError("no memory"), "queued", "oom"),
    (MemoryError(), "queued", "oom"),
    (OSError(28, "No space left on device"), "queued", "storage_error"),
    (ConnectionResetError("reset"), "queued", "download_failed"),
    (
        ModelError("hub model 'a/b': not in the cache, and the hub can't be reached"),
        "queued",
        "download_failed",
    ),
    (
        ModelError("device 'cuda:0' does not exist; this machine has cpu"),
        "queued",
        "gpu_unavailable",
    ),
    (ModelError("model './tiny': /tmp/tiny does not exist"), "failed", "weights_missing"),
    (
        ModelError("/tmp/tiny has no weights: none of model.safetensors"),
        "failed",
        "weights_missing",
    ),
    (ModelError("x.gguf is corrupt"), "failed", "model_invalid"),
    (IncompatibleError("other tokenizers"), "failed", "model_invalid"),
    (CaptureError("a tap fired twice"), "failed", "capture_failed"),
    (ConfigError("no such rule"), "failed", "config_invalid"),
    (PromptError("no prompts"), "failed", "config_invalid"),
    (ZeroDivisionError("division by zero"), "failed", "internal"),
    (RunStoppedError("late", "deadline"), "timed_out", "deadline"),
    (RunStoppedError("no", "user"), "cancelled", "user"),
]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("error", "status", "code"), ERRORS, ids=[f"{type(e).__name__}-{c}" for e, _, c in ERRORS]
)
def test_an_error_has_a_reason_and_never_a_verdict(
    db: Database, queue: Queue, take: Take, peek: Peek, *,
    measuring: Measuring, config: Any, tmp_path: Path, error: BaseException, status: str, code: str,
) -> None:  # fmt: skip
    """Catches the monitor's trouble that looks like a regression, or a night lost to it (X9, B09)."""
    run_id = queue(config=config, base_dir=str(tmp_path))
    measuring.error = error
    perform(db, take(), around(tmp_path), measuring)

    assert peek(run_id, "status", "verdict", "num_alerts") == (status, None, 0)
    (attempt,) = list_attempts(db, run_id)
    assert attempt.reason_code == code
    assert attempt.error_class == type(error).__name__
    assert (rows(db, "run_candidate"), rows(db, "alert"), rows(db, "device_slot")) == (0, 0, 0)


def test_a_run_that_was_taken_away_is_left_alone(
    db: Database, queue: Queue, take: Take, peek: Peek, *,
    measuring: Measuring, config: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """Catches a worker that fails a run which somebody else has by now."""
    run_id = queue(config=config, base_dir=str(tmp_path))
    measuring.error = LeaseLostError("gone")
    perform(db, take(), around(tmp_path), measuring)
    assert peek(run_id, "status") == RunStatus.PREPARING


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"threads": "many"}, "threads", id="not-valid"),
        pytest.param({"reference": {"model": "/etc/model.gguf"}}, "lies outside of", id="outside"),
    ],
)
def test_a_configuration_that_must_not_run(
    db: Database, queue: Queue, take: Take, *,
    measuring: Measuring, config: Any, tmp_path: Path, change: Any, words: str,
) -> None:  # fmt: skip
    """Catches a worker that dies of a bad row, and a queued run that reads any file (issue 7)."""
    run_id = queue(config={**config, **change}, base_dir=str(tmp_path))
    told: list[Trouble] = []
    perform(db, take(), around(tmp_path, tell=lambda _, t: told.append(t)), measuring)

    assert measuring.requests == []
    (trouble,) = told
    assert (trouble.run_id, trouble.status, trouble.reason_code) == (
        run_id,
        "failed",
        "config_invalid",
    )
    assert words in str(trouble.reason_text)


def test_roots_of_the_service_hold(
    db: Database, queue: Queue, take: Take, *, measuring: Measuring, config: Any, tmp_path: Path
) -> None:
    """Catches a run queued from another folder that reads there."""
    queue(config=config, base_dir=str(tmp_path))
    perform(db, take(), around(tmp_path, roots=(tmp_path / "allowed",)), measuring)
    assert measuring.requests == []


RECIPE = """
weights = "int4"
granularity = "channel"
method = "gptq"
calibration = { suite = { files = ["prompts.txt"] }, limit = 4 }
"""


@pytest.fixture
def filed(config: Any, tmp_path: Path) -> dict[str, Any]:
    """The check with a recipe file in three places, under two names."""
    (tmp_path / "r.toml").write_text(RECIPE)
    files = {"same": "r.toml", "again": "./r.toml", "third": "r.toml"}
    plain = config["candidates"][0]
    candidates = [plain | {"name": name, "recipe": file} for name, file in files.items()]
    return {**config, "candidates": candidates}


def test_a_recipe_file_is_read_once(
    db: Database, queue: Queue, take: Take, *, measuring: Measuring, filed: Any, tmp_path: Path
) -> None:
    """Catches a file that is looked at, changed, and then read again by who loads the model."""
    queue(config=filed, base_dir=str(tmp_path))
    perform(db, take(), around(tmp_path), measuring)
    (request,) = measuring.requests
    (tmp_path / "r.toml").write_text(RECIPE.replace("prompts.txt", "../secret.txt"))
    for candidate in request.check.candidates:
        assert isinstance(candidate.recipe, RecipeConfig)
        assert candidate.recipe == recipe_config(candidate.recipe, tmp_path)
        assert candidate.recipe.calibration is not None
        assert candidate.recipe.calibration.suite.files == ("prompts.txt",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(RECIPE.replace("prompts.txt", "../x.txt"), "lies outside of", id="outside"),
        pytest.param('weights = "int9"', "int9", id="not valid"),
        pytest.param("weights", "not valid TOML", id="no TOML"),
        pytest.param(None, "cannot be read", id="missing"),
    ],
)
def test_a_recipe_file_that_must_not_be_used(
    db: Database, queue: Queue, take: Take, *,
    measuring: Measuring, filed: Any, tmp_path: Path, text: str | None, words: str,
) -> None:  # fmt: skip
    """Catches a file that names no texts when it is checked, since it can't be read just then."""
    (tmp_path / "r.toml").unlink()
    if text is not None:
        (tmp_path / "r.toml").write_text(text)
    queue(config=filed, base_dir=str(tmp_path))
    told: list[Trouble] = []
    perform(db, take(), around(tmp_path, tell=lambda _, t: told.append(t)), measuring)
    assert measuring.requests == []
    assert told[0].reason_code == "config_invalid"
    assert words in str(told[0].reason_text)


def test_secrets_stay_out_of_the_reason(
    db: Database, queue: Queue, take: Take, *, measuring: Measuring, config: Any, tmp_path: Path
) -> None:
    """Catches a token in an error message that stands in the database (B29)."""
    redaction.register("canary-token-123")
    run_id = queue(config=config, base_dir=str(tmp_path))
    measuring.error = ConnectionError("GET https://user:pw@hub.example/x canary-token-123 failed")
    perform(db, take(), around(tmp_path), measuring)
    redaction.forget()

    (attempt,) = list_attempts(db, run_id)
    assert attempt.message is not None
    assert "canary" not in attempt.message
    assert "user:pw" not in attempt.message


@contextmanager
def locked(db: Database, seconds: float) -> Iterator[None]:
    """Hold the write lock of the database for so long, from another connection."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with db.writer() as session:
            if session.get_bind().dialect.name == "postgresql":
                session.execute(text('LOCK TABLE run, "check" IN ACCESS EXCLUSIVE MODE'))
            held.set()
            done.wait(seconds)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize(
    ("wait_s", "lock_s"), [(0.3, 1.5), pytest.param(10.0, 11.5, marks=pytest.mark.slow)]
)
def test_a_locked_database_is_no_regression(
    db: Database, queue: Queue, take: Take, peek: Peek, *,
    measuring: Measuring, config: Any, tmp_path: Path, wait_s: float, lock_s: float,
) -> None:  # fmt: skip
    """Catches a lock of ten seconds reported as a broken model, or a night lost to it (B09)."""
    run_id = queue(config=config, base_dir=str(tmp_path))
    claim, impatient = take(), open_database(db.url, wait_s=wait_s)
    ready, locking = threading.Event(), threading.Event()

    def wait_for_the_lock() -> None:
        ready.set()
        assert locking.wait(20)

    measuring.before_end = wait_for_the_lock
    work = threading.Thread(target=perform, args=(impatient, claim, around(tmp_path), measuring))
    work.start()
    assert ready.wait(20)
    with locked(db, lock_s):
        locking.set()
    work.join(60)
    impatient.close()

    assert peek(run_id, "status", "verdict", "attempt") == (RunStatus.QUEUED, None, 1)
    (attempt,) = list_attempts(db, run_id)
    assert (attempt.outcome, attempt.reason_code) == ("failed", "storage_error")
    assert (rows(db, "run_candidate"), rows(db, "alert"), rows(db, "event")) == (0, 0, 0)
    db.clock_shift = timedelta(minutes=2)
    measuring.before_end = lambda: None
    perform(db, take(), around(tmp_path), measuring)
    assert get_result(db, run_id).verdict == "regression", "the second attempt says what is true"
