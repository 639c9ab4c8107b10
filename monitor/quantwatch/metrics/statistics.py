"""Statistics of one metric at one scope: one wide row from per-prompt vectors.

Every sum is taken per prompt and folded in prompt order, so any way of sharding prompts gives the
same bits. Quantiles interpolate linearly, std uses n − 1. The standard error is clustered by
prompt: with r_g = Σ_t (x_gt − x̄) over the tokens of prompt g, se² = G/(G − 1) · Σ_g r_g² / n²
(Liang and Zeger's sandwich for a mean, with the usual small-sample factor): tokens of one prompt
are not independent.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quantwatch.domain import Measurement, Scope

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PromptValues:
    """One metric at one scope on one prompt: values and their token positions, both [P]."""

    prompt: int
    values: Vector
    positions: NDArray[np.int64]


def summarize(
    metric: str,
    scope: Scope,
    parts: Sequence[PromptValues],
    *,
    worst: Literal["max", "min"],
    method: str,
    num_missing: int = 0,
) -> Measurement:
    """Return all statistics of the parts, which must be in prompt order.

    `max_prompt` and `max_position` locate the worst value: the first non-finite one if there is any
    (not counting infinities in the good direction), else the largest, or the smallest where higher
    is better.
    """
    everything = np.concatenate([part.values for part in parts]) if parts else np.empty(0)
    finite = _finite(everything)
    mean = fold(part.values for part in parts) / finite.size if finite.size else None
    place = _worst_place(parts, worst)
    return Measurement(
        metric=metric,
        scope=scope,
        n=int(everything.size),
        n_nan=int(np.isnan(everything).sum()),
        n_posinf=int(np.isposinf(everything).sum()),
        n_neginf=int(np.isneginf(everything).sum()),
        n_missing=num_missing,
        mean=mean,
        std=_std(parts, mean, finite.size),
        se=clustered_se(parts, mean, finite.size),
        **_order_statistics(finite),
        max_prompt=place[0],
        max_position=place[1],
        method=method,
    )


def _order_statistics(finite: Vector) -> dict[str, float | None]:
    names = ("min", "p50", "p90", "p95", "p99", "p999", "max")
    if not finite.size:
        return dict.fromkeys(names)
    return dict(
        zip(names, np.quantile(finite, (0, 0.5, 0.9, 0.95, 0.99, 0.999, 1)).tolist(), strict=True)
    )


def clustered_se(parts: Sequence[PromptValues], mean: float | None, n: int) -> float | None:
    """Return the standard error of the mean, clustered by prompt; None below two prompts."""
    clusters = [part for part in parts if np.isfinite(part.values).any()]
    if mean is None or len(clusters) < 2:
        return None
    residuals = [float((_finite(part.values) - mean).sum()) for part in clusters]
    factor = len(clusters) / (len(clusters) - 1)
    return math.sqrt(factor * math.fsum(r * r for r in residuals)) / n


def partials(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return n, Σ, Σ², max of the finite values of each row: [S, P] → [S, 4]; max NaN if none."""
    good = np.isfinite(values)
    kept = np.where(good, values, 0.0)
    largest = np.where(good, values, -np.inf).max(axis=-1, initial=-np.inf)
    largest = np.where(good.any(axis=-1), largest, np.nan)
    return np.stack([good.sum(-1), kept.sum(-1), (kept * kept).sum(-1), largest], axis=-1)


def _finite(values: Vector) -> Vector:
    return values[np.isfinite(values)]


def fold(vectors: Iterable[Vector]) -> float:
    """Return the sum of the finite values, added vector by vector in the order given."""
    total = 0.0
    for vector in vectors:
        total += float(_finite(vector).sum())
    return total


def _std(parts: Sequence[PromptValues], mean: float | None, n: int) -> float | None:
    if mean is None or n < 2:
        return None
    return math.sqrt(fold((part.values - mean) ** 2 for part in parts) / (n - 1))


def _worst_place(
    parts: Sequence[PromptValues], worst: Literal["max", "min"]
) -> tuple[int | None, int | None]:
    """Locate the worst value; infinities in the good direction (sqnr_db = +∞) are no trouble."""
    sign = 1.0 if worst == "max" else -1.0
    best: tuple[float, int | None, int | None] = (-math.inf, None, None)
    for part in parts:
        badness = np.where(np.isnan(part.values), np.inf, sign * part.values)
        if badness.size and badness.max() > best[0]:
            at = int(badness.argmax())
            best = (float(badness[at]), part.prompt, int(part.positions[at]))
    return best[1], best[2]
