"""The promise on numbers, on the real model: every statistic against an independent float64 computation.

The logits are taken where the pipeline takes them (a recorder in front of the kernels), so the two
computations see the same float32 numbers and differ only in arithmetic.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest
import torch

from quantwatch.capture import layers as lens_module
from quantwatch.capture import outputs as outputs_module
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import CandidateResult
from quantwatch.metrics.registry import METRICS, OF_SERVED_ALONE
from quantwatch.pipeline import RunRequest, run_check
from quantwatch.pipeline.judge import judge
from quantwatch.pipeline.measure import measure_check
from quantwatch_kernels.compare.lens import lens_statistics
from quantwatch_kernels.compare.lens_native import why_not_native
from quantwatch_kernels.compare.output import OutputStatistics, output_statistics

pytestmark = [pytest.mark.model, pytest.mark.slow]
CACHE = Path(platformdirs.user_cache_dir("quantwatch"))
MODEL = {"model": "smollm2-135m"}


class Quiet:
    def start(self, stage: str, total_tokens: int) -> None:
        """Say nothing."""

    def advance(self, tokens: int) -> None:
        """Say nothing."""


class Recorder:
    """Stands in front of a kernel, keeps what goes in and comes out, and passes it on."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op = op
        self.calls: list[tuple[tuple[Any, ...], Any]] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.op(*args, **kwargs)
        kept = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
        self.calls.append((kept, found))
        self.options.append(kwargs)
        return found


def exact(z_ref: torch.Tensor, z_cand: torch.Tensor, target: int) -> dict[str, float]:
    """One row in float64, from the definitions; nothing shared with the kernels."""
    a, b = z_ref.double().numpy(), z_cand.double().numpy()
    log_p = a - a.max() - math.log(np.exp(a - a.max()).sum())
    log_q = b - b.max() - math.log(np.exp(b - b.max()).sum())
    p, q = np.exp(log_p), np.exp(log_q)
    log_m = np.logaddexp(log_p, log_q) - math.log(2)
    order = np.argsort(-a, kind="stable")
    row = {
        "logit_kl": float((p * (log_p - log_q)).sum()),
        "reverse_kl": float((q * (log_q - log_p)).sum()),
        "js": float(0.5 * (p * (log_p - log_m)).sum() + 0.5 * (q * (log_q - log_m)).sum()),
        "tv": float(0.5 * np.abs(p - q).sum()),
        "topk_logit_deviation_k5": float(np.abs(a - b)[order[:5]].mean()),
        "topk_logit_deviation_k3": float(np.abs(a - b)[order[:3]].mean()),
    }
    if target >= 0:
        row["delta_p"] = float(q[target] - p[target])
        row["nll_reference"], row["nll_candidate"] = -float(log_p[target]), -float(log_q[target])
        row["nll_difference"] = float(log_p[target] - log_q[target])
    return row


def check_of(*candidates: dict[str, Any], files: list[str], **settings: Any) -> CheckConfig:
    return CheckConfig.model_validate(
        {
            "reference": MODEL,
            "candidates": candidates,
            "suite": {"files": files},
            "threads": 1,
            **settings,
        }
    )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short prompts of the shipped suite: English and Chinese."""
    import json

    from quantwatch.prompts import loading

    data = Path(loading.__file__).parent / "data" / "core-v1.jsonl"
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    chosen = [next(x["text"] for x in lines if x["category"] == c) for c in ("prose_en", "chinese")]
    target = tmp_path_factory.mktemp("real") / "prompts.json"
    target.write_text(json.dumps([text[:220] for text in chosen]))
    return target


Captured = tuple[CandidateResult, list[Any], list[Any]]
CANDIDATES: dict[str, dict[str, Any]] = {
    "int8": {**MODEL, "name": "int8", "recipe": "int8-channel"},
    "int4": {**MODEL, "name": "int4", "recipe": "int4-g64"},
    "bf16": {**MODEL, "name": "bf16", "dtype": "bfloat16"},
    "tiny-fault": {
        **MODEL,
        "name": "tiny-fault",
        "faults": [{"scope": "layers.29.mlp.down_proj", "scale": 1.000001}],
    },
}


@pytest.fixture(scope="module", params=list(CANDIDATES))
def captured(request: pytest.FixtureRequest, prompts: Path) -> Captured:
    """One run per candidate with recorders in front of the output and lens kernels.

    Without isolated prompts there is no noise floor, whose calls would be recorded as well.
    """
    from datetime import UTC, datetime

    check = check_of(CANDIDATES[request.param], files=[prompts.name], isolated_fraction=0.0)
    wanted = RunRequest("real", check, prompts.parent, CACHE)
    with pytest.MonkeyPatch.context() as patch:
        output, lens = Recorder(output_statistics), Recorder(lens_statistics)
        patch.setattr(outputs_module, "output_statistics", output)
        patch.setattr(lens_module, "lens_statistics", lens)
        with measure_check(wanted, Quiet()) as measured:
            run = judge(wanted, measured, "run", datetime.now(UTC), None)
    chunks = [
        (*args, options["chunk"])
        for (args, _), options in zip(lens.calls, lens.options, strict=True)
    ]
    reads = [found for _, found in lens.calls]
    return run.candidates[0], output.calls, list(zip(chunks, reads, strict=True))


def test_output_statistics_are_right(captured: Captured) -> None:
    """Catches float32 noise in small divergences: single tokens to 1e-4, means to 1e-6 relative."""
    result, calls, _ = captured
    truth: dict[str, list[float]] = {}
    for (z_ref, z_cand, targets, *_), found in calls:
        for i in range(len(z_ref)):
            row = exact(z_ref[i], z_cand[i], int(targets[i]))
            for name, value in row.items():
                truth.setdefault(name, []).append(value)
                ours = float(getattr(found, name)[i])
                # Below 1e-12 nats even the float64 reference has only rounding left.
                assert ours == pytest.approx(value, rel=1e-4, abs=1e-12), (name, i)
    for name, values in truth.items():
        row_ = result.find(name)
        assert row_ is not None
        assert row_.n == len(values)
        scale = np.abs(values).mean() if name == "delta_p" else 0.0
        assert row_.mean == pytest.approx(np.mean(values), rel=1e-6, abs=1e-6 * scale + 1e-14), name


def test_lens_statistics_are_right(captured: Captured) -> None:
    """Catches a lens through the candidate's own head, and small per-layer KLs lost in float32.

    The truth multiplies in float64: what both models' products are off by must not show.
    """
    assert why_not_native() is None, "the figures are about lens.cpp, which needs a C++ compiler"
    _, _, calls = captured
    ours: list[float] = []
    truth: list[float] = []
    for (h_ref, h_cand, readout, _), found in calls:
        unequal = (h_ref != h_cand).any(-1).nonzero().flatten()
        weight = readout.head.weight.detach()[: readout.width].double()
        for rows in unequal.split(64):
            z_ref, z_cand = (readout.normed(h[rows]).double() @ weight.t() for h in (h_ref, h_cand))
            truth += [exact(a, b, -1)["logit_kl"] for a, b in zip(z_ref, z_cand, strict=True)]
            ours += found.kl[rows].tolist()
        equal = (h_ref == h_cand).all(-1)
        assert not found.kl[equal].any()
    assert ours
    # Below 1e-12 nats even the float64 reference has only rounding left.
    assert ours == pytest.approx(truth, rel=1e-4, abs=1e-12)
    assert np.mean(ours) == pytest.approx(np.mean(truth), rel=1e-6, abs=1e-14)


def test_quantiles_are_those_of_the_tokens(captured: Captured) -> None:
    """Catches quantiles of prompts, or of a sketch."""
    result, calls, _ = captured
    kl = np.concatenate([found.logit_kl.numpy() for _, found in calls])
    row = result.find("logit_kl")
    assert row is not None
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)):
        assert getattr(row, name) == pytest.approx(np.quantile(kl, q), rel=1e-6, abs=1e-14)


def test_every_metric_of_the_registry_is_measured(captured: Captured) -> None:
    """Catches a metric that is documented and never emitted (two, and estimates, need other
    settings, and those of routers a mixture of experts)."""
    result, _, _ = captured
    routers = {slug for slug, spec in METRICS.items() if spec.where == "router"}
    absent = routers | {slug for slug in METRICS if slug.startswith("lens_kl_")} | OF_SERVED_ALONE
    assert {m.metric for m in result.measurements} == set(METRICS) - absent - {
        "leaked_mass",
        "isolated_error",
    }
    assert set(OutputStatistics._fields) >= {"logit_kl", "nll_difference"}


def test_an_identical_model_is_exactly_equal(prompts: Path) -> None:
    """Catches any arithmetic that is not symmetric in its inputs: equal must be 0, not 1e-13."""
    check = check_of({**MODEL, "name": "same"}, files=[prompts.name])
    run = run_check(
        RunRequest("real", check, prompts.parent, CACHE), database=None, progress=Quiet()
    )
    (same,) = run.candidates
    assert same.bit_equal
    assert run.alerts == ()
    for m in same.measurements:
        spec = METRICS[m.metric]
        if spec.direction != "neutral" and spec.slug not in ("nll_candidate", "headroom_bits"):
            best = spec.best_value
            if math.isinf(best):
                assert (m.n_posinf, m.mean) == (m.n, None), m
            else:
                assert (m.min, m.mean, m.max) == (best, best, best), m
