"""A finished run with one candidate, and ways to change it."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from quantwatch.domain import (
    Alert,
    CandidateResult,
    Culprit,
    Fingerprint,
    Measurement,
    NonFinite,
    RunResult,
    RunStatus,
    Scope,
    Severity,
    Variant,
    Verdict,
)


def row(metric: str, scope: str, mean: float | None, **changes: Any) -> Measurement:
    made = Measurement(
        metric=metric, scope=Scope(scope), n=10, n_nan=0, n_posinf=0, n_neginf=0, n_missing=0,
        mean=mean, std=0.1, se=None, min=mean, p50=mean, p90=mean, p95=mean, p99=mean, p999=mean,
        max=mean, max_prompt=3, max_position=14, method="all positions",
    )  # fmt: skip
    return replace(made, **changes)


def variant(name: str, **digests: str) -> Variant:
    names = ("weights", "config", "tokenizer", "recipe", "serve", "fault")
    plain = {f"{what}_sha": f"{name}-{what}" for what in names}
    return Variant(
        name=name, fingerprint=Fingerprint(**plain | digests), execution="float32",
        size_bytes=538_060_800, bits_per_weight=32.0, source={"model": "smollm2-135m"},
        notes=("a note",), skipped=((Scope("head"), "excluded"),),
    )  # fmt: skip


def run(**changes: Any) -> RunResult:
    cand = CandidateResult(
        name="int8",
        variant=variant("int8"),
        verdict=Verdict.REGRESSION,
        measurements=(
            row("logit_kl", "model", 0.002),
            row("sqnr_db", "layers.0", None, n_posinf=10, max=float("inf")),
            row("lens_kl", "layers.0", None, n_nan=10),
        ),
        culprit=Culprit(Scope("layers.0"), 0.1, Scope("layers.0"), "words – with ünïcode", (1, 2)),
        first_nonfinite=NonFinite(Scope("layers.0"), 1, 2),
        baseline_differences=({"metric": "logit_kl", "value": None},),
    )
    alert = Alert(
        "nonfinite", "int8", "lens_kl", "mean", Scope("layers.0"), None, "nan", 0.15,
        Severity.CRITICAL, "words",
    )  # fmt: skip
    made = RunResult(
        run_id="01JQ", check="nightly", status=RunStatus.SUCCEEDED, verdict=Verdict.REGRESSION,
        started_at=datetime(2026, 11, 28, 2, 30, tzinfo=UTC),
        finished_at=datetime(2026, 11, 28, 2, 33, 20, 125, tzinfo=UTC),
        suite_name="core-v1", suite_hash="5" * 64, num_tokens=4096, num_prompts=16,
        reference=variant("ref"), capture_sha="c" * 64, metrics_version=1,
        environment={"python": "3.11", "cpu": {"capability": "AVX512"}, "gpus": []},
        config={"suite": {"name": "core-v1"}}, candidates=(cand,), alerts=(alert,),
        noise_floor={("logit_kl", "model"): 5e-12, ("lens_kl", "layers.0"): float("nan")},
        timings_s={"load": 1.5}, capture={"taps": {"head": "lm_head"}},
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture(name="run")
def _run() -> Callable[..., RunResult]:
    return run


@pytest.fixture(name="row")
def _row() -> Callable[..., Measurement]:
    return row


@pytest.fixture(name="variant")
def _variant() -> Callable[..., Variant]:
    return variant
