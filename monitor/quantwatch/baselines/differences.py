"""What differs between a candidate now and in the baseline: numbers, and their possible causes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from quantwatch.domain import Baseline, CandidateResult, Comparison, Json, Measurement, RunResult
from quantwatch.metrics.registry import METRICS

NoiseFloor = Mapping[tuple[str, str], float]
_QUADRATIC = {"logit_kl", "served_kl", "reverse_kl", "js", "lens_kl", "feature_kl"}
_ABSENT = "absent"
_ROUNDING = 1e-5
"""By how much two correct float32 implementations differ, in logits and in relative errors. Another
machine rounds differently even where another batch on the same machine does not."""


def differences(
    candidate: CandidateResult, baseline: CandidateResult, noise_floor: NoiseFloor
) -> tuple[Json, ...]:
    """Return one record per metric and scope whose mean changed, in the order measured.

    Only metrics that compare with the reference: the others have no noise floor. Keys: metric,
    scope, value, baseline, difference (None where not finite), value_kind, baseline_kind, noise
    (what noise alone can do), below_noise, worse; of the paired test ci_low, ci_high, p, q and
    num_prompts (None where no prompts were paired; q only of what rules judge). Strict JSON.
    """
    before = {(row.metric, row.scope): row for row in baseline.measurements}
    tests = baseline.comparisons if isinstance(baseline, Baseline) else {}
    return tuple(
        record | _test(tests.get((row.metric, row.scope)))
        for row in candidate.measurements
        if compares(row.metric)
        and (record := _difference(row, before.get((row.metric, row.scope)), noise_floor))
    )


def changes(run: RunResult, baseline: RunResult, candidate: str) -> tuple[Json, ...]:
    """Return what else changed, as records of name, value and baseline: a cause, never a refusal.

    Environment (versions, CPU, driver, commit) and the candidate's digests, execution and size.
    """
    now, before = _causes(run, candidate), _causes(baseline, candidate)
    names = [*now, *(name for name in before if name not in now)]
    return tuple(
        {"name": name, "value": now.get(name, _ABSENT), "baseline": before.get(name, _ABSENT)}
        for name in names
        if now.get(name, _ABSENT) != before.get(name, _ABSENT)
    )


def compares(metric: str) -> bool:
    """Say whether a metric is a distance between candidate and reference."""
    spec = METRICS[metric]
    is_distance = spec.direction != "neutral" and math.isfinite(spec.best_value)
    return is_distance and not spec.estimated and metric not in ("nll_candidate", "router_load_max")


def noise_of_difference(metric: str, floor: float, value: float, baseline: float) -> float:
    """Return how far noise can move a mean, given the floor of the reference against itself.

    Errors and agreements obey the triangle inequality: by the floor. A KL is about half the square
    of a distance, √(k + noise) ≤ √k + √floor: by floor + 2·√(k·floor), which for a quantized
    candidate is far more than the floor itself. No floor is below float32's rounding.
    """
    if metric not in _QUADRATIC:
        return max(floor, _ROUNDING)
    floor = max(floor, _ROUNDING**2 / 2)
    return floor + 2 * math.sqrt(max(value, baseline, 0.0) * floor)


def _difference(
    row: Measurement, before: Measurement | None, noise_floor: NoiseFloor
) -> dict[str, Any] | None:
    now_mean, now_kind = _mean(row)
    then_mean, then_kind = _mean(before)
    if (now_mean, now_kind) == (then_mean, then_kind):
        return None
    record: dict[str, Any] = {
        "metric": row.metric,
        "scope": row.scope,
        "value": now_mean,
        "value_kind": now_kind,
        "baseline": then_mean,
        "baseline_kind": then_kind,
        "difference": None,
        "noise": None,
        "below_noise": False,
        "worse": None,
    }
    if now_mean is None or then_mean is None:
        return record
    floor = noise_floor.get((row.metric, row.scope), 0.0)
    noise = noise_of_difference(row.metric, floor, now_mean, then_mean)
    difference = now_mean - then_mean
    return record | {
        "difference": difference,
        "noise": noise,
        "below_noise": abs(difference) <= noise,
        "worse": _worse(row.metric, difference),
    }


def _test(comparison: Comparison | None) -> dict[str, Any]:
    """Return a paired test's columns; bounds that are not finite become None."""
    if comparison is None:
        return dict.fromkeys(("ci_low", "ci_high", "p", "q", "num_prompts"))
    low, high = (
        bound if math.isfinite(bound) else None for bound in (comparison.low, comparison.high)
    )
    return {
        "ci_low": low,
        "ci_high": high,
        "p": comparison.p,
        "q": comparison.q,
        "num_prompts": comparison.num_prompts,
    }


def _worse(metric: str, difference: float) -> bool:
    return (difference > 0) == (METRICS[metric].direction == "lower")


def _mean(row: Measurement | None) -> tuple[float | None, str]:
    """Return a mean and its kind; any NaN or infinite value makes it non-finite here."""
    if row is None or row.n == 0:
        return None, "missing"
    for kind, count in (("nan", row.n_nan), ("posinf", row.n_posinf), ("neginf", row.n_neginf)):
        if count:
            return None, kind
    return row.mean, "finite"


def _causes(run: RunResult, candidate: str) -> dict[str, Any]:
    causes = dict(_flat("environment", run.environment))
    variant = next((c.variant for c in run.candidates if c.name == candidate), None)
    if variant is not None:
        causes |= {name: getattr(variant.fingerprint, name) for name in _digests(variant)}
        causes |= {"execution": variant.execution, "size_bytes": variant.size_bytes}
    return causes


def _digests(variant: Any) -> tuple[str, ...]:
    return tuple(variant.fingerprint.__slots__)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested tables as dotted names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}", inner)
    else:
        yield prefix, value
