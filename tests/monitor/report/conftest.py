"""Small honest runs for the report formats: every number is what a real run of that kind has."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from quantwatch.domain import (
    MODEL,
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

OUTPUT = {
    "logit_kl": 0.01,
    "top1_agreement": 0.98,
    "topk_logit_deviation_k5": 0.2,
    "topk_logit_deviation_k3": 0.25,
    "nll_reference": math.log(20.0),
    "nll_candidate": math.log(21.0),
    "nll_difference": math.log(1.05),
}
LAYER = {
    "lens_kl": 0.02,
    "isolated_error": 0.004,
    "rel_error": 0.01,
    "sqnr_db": 40.0,
    "cosine": 0.999,
    "feature_kl": 1e-4,
}


class Results:
    """Builders. Every argument has a harmless default."""

    @staticmethod
    def row(metric: str, scope: str, mean: float | None, **changes: Any) -> Measurement:
        row = Measurement(
            metric=metric, scope=Scope(scope), n=100, n_nan=0, n_posinf=0, n_neginf=0, n_missing=0,
            mean=mean, std=mean, se=None if mean is None else abs(mean) / 10, min=mean, p50=mean,
            p90=mean, p95=mean, p99=mean, p999=mean, max=mean, max_prompt=0, max_position=7,
            method="all positions",
        )  # fmt: skip
        return replace(row, **changes)

    @classmethod
    def rows(cls, num_layers: int = 4, hot: int | None = None) -> tuple[Measurement, ...]:
        rows = [cls.row(metric, MODEL, mean) for metric, mean in OUTPUT.items()]
        for index in range(num_layers):
            factor = 12.0 if index == hot else 1.0
            for part in ("", ".mlp", ".mlp.down_proj", ".attention"):
                rows += [
                    cls.row(
                        m, f"layers.{index}{part}", v * (factor if m == "isolated_error" else 1)
                    )
                    for m, v in LAYER.items()
                    if not (part and m in ("lens_kl", "feature_kl"))
                ]
        for end in ("head", "embedding", "final_norm"):
            rows += [cls.row(m, end, LAYER[m]) for m in ("isolated_error", "rel_error", "cosine")]
        return tuple(rows)

    @staticmethod
    def variant(name: str = "int8", **changes: Any) -> Variant:
        print_ = Fingerprint("a" * 64, "b" * 64, "c" * 64, "", "", "")
        source = {"model": f"models/{name}"}
        return replace(Variant(name, print_, "dequantized", 135_000_000, 8.02, source), **changes)

    @classmethod
    def candidate(cls, name: str = "int8", **changes: Any) -> CandidateResult:
        result = CandidateResult(
            name=name,
            variant=cls.variant(name),
            verdict=Verdict.PASS,
            measurements=cls.rows(),
            culprit=Culprit(None, None, None, "No module's isolated error is beyond its floor."),
        )
        return replace(result, **changes)

    @classmethod
    def faulty(cls, name: str = "int8-fault", layer: int = 2) -> CandidateResult:
        scope = Scope(f"layers.{layer}.mlp.down_proj")
        words = f"{scope}: isolated error 0.048, 12 × the median of the other layers."
        return cls.candidate(
            name,
            verdict=Verdict.REGRESSION,
            measurements=cls.rows(hot=layer),
            culprit=Culprit(scope, 0.048, Scope(f"layers.{layer}.mlp"), words),
        )

    @classmethod
    def nan(cls) -> CandidateResult:
        gone: dict[str, Any] = dict.fromkeys(("se", "p50", "p90", "p99", "p999", "max"))
        rows = [
            cls.row(row.metric, row.scope, None, **gone, n_nan=100)
            if row.scope in (MODEL, "layers.3") and row.metric != "nll_reference"
            else row
            for row in cls.rows()
        ]
        return cls.candidate(
            "nan",
            verdict=Verdict.REGRESSION,
            measurements=tuple(rows),
            first_nonfinite=NonFinite(Scope("layers.3.attention"), 0, 0),
        )

    @staticmethod
    def alert(candidate: str = "int8-fault", **changes: Any) -> Alert:
        alert = Alert(
            rule="isolated-error-outlier", candidate=candidate, metric="isolated_error",
            statistic="mean", scope=Scope("layers.2"), value=0.048, value_kind="finite",
            threshold=0.012, severity=Severity.CRITICAL, words="layers.2 stands out",
        )  # fmt: skip
        return replace(alert, **changes)

    @classmethod
    def run(cls, *candidates: CandidateResult, **changes: Any) -> RunResult:
        known = [c.verdict for c in candidates if c.verdict is not None]
        result = RunResult(
            run_id="01JDEMO0000000000000000000", check="nightly", status=RunStatus.SUCCEEDED,
            verdict=Verdict.worst(known) if known else None,
            started_at=datetime(2026, 11, 29, 1, 2, 3, tzinfo=UTC),
            finished_at=datetime(2026, 11, 29, 1, 4, 3, tzinfo=UTC), suite_name="core-v1:demo",
            suite_hash="d" * 64, num_tokens=3900, num_prompts=16,
            reference=cls.variant("reference", execution="float32", bits_per_weight=32.0),
            capture_sha="e" * 64, metrics_version=1, environment={}, config={},
            candidates=candidates, timings_s={"load": 1.5, "capture": 20.25},
        )  # fmt: skip
        return replace(result, **changes)


@pytest.fixture
def make() -> type[Results]:
    return Results


@pytest.fixture
def fault_run() -> RunResult:
    """One candidate that passes, one with a planted fault, one alert."""
    candidates = (Results.candidate(), Results.faulty())
    return Results.run(*candidates, alerts=(Results.alert(),))


Make = type[Results]
Renderer = Callable[[RunResult], str]
