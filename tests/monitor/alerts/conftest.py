"""A candidate of 30 layers whose measurements are given by a few numbers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from quantwatch.domain import CandidateResult, Measurement, Scope

NUM_LAYERS = 30
Build = Callable[..., CandidateResult]


def measurement(metric: str, scope: str, mean: float | None, **changes: Any) -> Measurement:
    row = Measurement(
        metric=metric, scope=Scope(scope), n=1000, n_nan=0, n_posinf=0, n_neginf=0, n_missing=0,
        mean=mean, std=0.0, se=None, min=mean, p50=mean, p90=mean, p95=mean, p99=mean, p999=mean,
        max=mean, max_prompt=0, max_position=0, method="all positions",
    )  # fmt: skip
    return replace(row, **changes)


def candidate(
    *,
    output: Mapping[str, float] | None = None,
    lens: Mapping[int, float] | float = 0.0,
    isolated: Mapping[str, float] | float = 0.0,
    replaced: tuple[Measurement, ...] = (),
    **fields: Any,
) -> CandidateResult:
    """`lens` by layer and `isolated` by scope (or one value for all layers); rest is equal."""
    means = {"logit_kl": 0.0, "top1_agreement": 1.0, "nll_difference": 0.0} | dict(output or {})
    layers = [f"layers.{n}" for n in range(NUM_LAYERS)]
    lens_of = dict.fromkeys(range(NUM_LAYERS), lens) if isinstance(lens, float) else lens
    by_scope = dict.fromkeys(layers, isolated) if isinstance(isolated, float) else isolated
    rows = [measurement(metric, "model", mean) for metric, mean in means.items()]
    rows += [measurement("lens_kl", s, lens_of.get(n, 0.0)) for n, s in enumerate(layers)]
    scopes = ["embedding", *layers, "final_norm", "head"]
    rows += [measurement("isolated_error", s, by_scope.get(s, 0.0)) for s in scopes]
    changed = {(row.metric, row.scope): row for row in replaced}
    kept = tuple(changed.pop((row.metric, row.scope), row) for row in rows)
    return CandidateResult(
        name="cand", variant=None, verdict=None, measurements=(*kept, *changed.values()), **fields
    )


@pytest.fixture(name="candidate")
def _candidate() -> Build:
    return candidate


@pytest.fixture(name="measurement")
def _measurement() -> Callable[..., Measurement]:
    return measurement
