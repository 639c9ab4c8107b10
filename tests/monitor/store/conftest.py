"""Small honest results to put into it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantwatch.domain import (
    MODEL,
    Alert,
    Block,
    CandidateResult,
    Culprit,
    Fingerprint,
    Measurement,
    NonFinite,
    Prompt,
    RunResult,
    RunStatus,
    Scope,
    Severity,
    Suite,
    Variant,
    Verdict,
)
from quantwatch.store.runs import begin_run, finish_run
from quantwatch.store.session import Database
from quantwatch.telemetry import canonical_sha, new_run_id

START = datetime(2026, 11, 29, 2, 0, tzinfo=UTC)
Make = Callable[..., RunResult]
Save = Callable[..., RunResult]


@pytest.fixture
def sqlite_file(migrated_file: Path, tmp_path: Path) -> Path:
    """A migrated SQLite file."""
    return Path(shutil.copy(migrated_file, tmp_path / "file.db"))


@pytest.fixture
def suite() -> Suite:
    ids = ((1, 5, 9, 9), (1, 7, 3, 2))
    pieces = (("<s>", "a", "\0", "\ud83d"), ("<s>", "数", "学", "!"))
    prompts = tuple(
        Prompt(i, "prose", "file.txt", ids[i], pieces[i], text="a\0b" if i == 0 else "数学!")
        for i in range(2)
    )
    vocabulary = ("<s>", "a", "\0", "\ud83d", "数", "学", "!", "b", "c", "d")
    return Suite("tiny", canonical_sha(ids), prompts, vocabulary=vocabulary)


@pytest.fixture
def make_result(suite: Suite) -> Make:
    """Build a succeeded run of two candidates; `days` moves it, other names replace fields."""

    def make(days: float = 0, **fields: Any) -> RunResult:
        started = START + timedelta(days=days)
        result = RunResult(
            run_id=new_run_id(), check="nightly", status=RunStatus.SUCCEEDED,
            verdict=Verdict.REGRESSION, started_at=started,
            finished_at=started + timedelta(minutes=3), suite_name=suite.name,
            suite_hash=suite.hash, num_tokens=suite.num_tokens, num_prompts=2,
            reference=_variant("reference"), capture_sha="c" * 64, metrics_version=1,
            environment={"torch": "2.13"}, config={"batch_tokens": 256},
            candidates=(_candidate("int8", 0.01), _candidate("int4", 0.2)),
            alerts=(_alert("int4", 0.2),), noise_floor={("logit_kl", "model"): 1e-6},
            timings_s={"measure": 2.5}, capture={"observer_effect": {"int8": 0.0}},
        )  # fmt: skip
        return replace(result, **fields)

    return make


@pytest.fixture
def save(db: Database, make_result: Make, suite: Suite) -> Save:
    """Begin and finish a run; returns its result."""

    def save_one(days: float = 0, blocks: tuple[Block, ...] = (), **fields: Any) -> RunResult:
        result = make_result(days, **fields)
        begin(db, result)
        finish_run(db, result, suite, blocks)
        return result

    return save_one


def begin(db: Database, result: RunResult) -> None:
    begin_run(
        db,
        run_id=result.run_id,
        check=result.check,
        config=result.config,
        started_at=result.started_at,
    )


@pytest.fixture(name="begin")
def begin_fixture() -> Callable[[Database, RunResult], None]:
    return begin


@pytest.fixture
def token_blocks() -> tuple[Block, ...]:
    """One block of each kind for candidate int8."""
    scopes = (Scope("layers.0"), Scope("layers.1"))
    rng = np.random.default_rng(7)
    kl = rng.lognormal(-9, 3, (2, 4))
    missing = np.array([[False, True, False, True], [False, False, False, False]])
    ids = rng.integers(0, 49152, (5, 4, 3)).astype(np.float64)
    ids[[1, 3, 4]] = rng.normal(5, 4, (3, 4, 3)).astype(np.float32)
    return (
        Block("int8", "per_prompt", "lens_kl", None, scopes, rng.normal(size=(2, 2, 4))),
        Block("int8", "per_token", "lens_kl", 0, scopes, kl, missing),
        Block("int8", "topk", "logits", 0, (MODEL,), ids),
    )


def _variant(name: str) -> Variant:
    fingerprint = Fingerprint(canonical_sha(name), "b" * 64, "c" * 64, "", "", "")
    return Variant(name, fingerprint, "float32", 538_000_000, 32.0, {"path": "/models/smol"})


def _candidate(name: str, kl: float) -> CandidateResult:
    return CandidateResult(
        name=name, variant=_variant(name), verdict=Verdict.PASS if kl < 0.1 else Verdict.REGRESSION,
        measurements=(_measurement("logit_kl", MODEL, kl), _measurement("lens_kl", "layers.0", kl)),
        culprit=Culprit(Scope("layers.0"), kl, Scope("embedding"), "layers.0 stands out", (3, 4)),
        first_nonfinite=NonFinite(Scope("layers.1"), 1, 3),
    )  # fmt: skip


def _measurement(metric: str, scope: str, value: float) -> Measurement:
    return Measurement(
        metric=metric, scope=Scope(scope), n=8, n_nan=0, n_posinf=0, n_neginf=0, n_missing=0,
        mean=value, std=value / 3, se=value / 9, min=0.0, p50=value, p90=value, p95=value,
        p99=value, p999=value, max=2 * value, max_prompt=1, max_position=2, method="all positions",
    )  # fmt: skip


def _alert(candidate: str, value: float) -> Alert:
    return Alert(
        rule="kl", candidate=candidate, metric="logit_kl", statistic="mean", scope=MODEL,
        value=value, value_kind="finite", threshold=0.15, severity=Severity.CRITICAL,
        words="output KL 0.2 > 0.15",
    )  # fmt: skip
