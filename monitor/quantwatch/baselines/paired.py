"""Paired tests over prompts: the same prompts and tokens in both runs, prompt by prompt.

With n_g values of prompt g in each run and d_g the difference of the prompt's means, the difference
of the two token-weighted means is D = Σ n_g·d_g / Σ n_g. Tokens of one prompt are not independent,
so a prompt is one observation: se² = G/(G − 1) · Σ (n_g·(d_g − D))² / (Σ n_g)², and p is that of
D/se under Student's t with G − 1 degrees of freedom. When nothing changed, d_g is as often above as
below 0, where this test errs on the safe side, and unlike a resampled p it has no smallest value,
which control over hundreds of series needs.

The interval is a percentile bootstrap: prompts are drawn again, G of G, at levels widened for few
prompts (Hesterberg 2015: Φ(−√(G/(G−1))·t) in place of 2.5 %), seeded by the runs.

A baseline that was chosen as the best of N runs is better than it should be, by about what the best
of N draws of noise is: its handicap, Φ⁻¹((N − ⅜)/(N + ¼)) standard deviations of one run (Blom
1958).

No spread is taken to be below the noise floor of its scope: with zero variance every difference
would be infinitely clear. Equal values give exactly D = 0, interval [0, 0], p = 1.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from quantwatch.baselines import student
from quantwatch.domain import MIN_SAMPLES, Comparison, Scope

Matrix = NDArray[np.float64]
RESAMPLES = 1999
CONFIDENCE = 0.95
_ROUNDING = 2.0**-40
"""Of a mean: what sums in another order do to it."""


@dataclass(frozen=True, slots=True)
class PromptSums:
    """Number and sum of the values of every prompt at every scope, [N, S], a mean over runs."""

    scopes: tuple[Scope, ...]
    n: Matrix
    total: Matrix
    num_runs: int = 1

    @classmethod
    def over(
        cls, scopes: tuple[Scope, ...], blocks: Sequence[Matrix], *, squares: bool = False
    ) -> "PromptSums":
        """Join the `per_prompt` blocks [N, S, 4] of one or several runs that measured the same.

        With `squares` the values are the squares of what was measured.
        """
        stacked = np.stack(blocks)
        total = stacked[..., 2 if squares else 1].mean(0)
        return cls(scopes, stacked[..., 0].mean(0), total, len(blocks))

    def at(self, scopes: Sequence[Scope]) -> "PromptSums":
        """Return the columns of some scopes, in that order."""
        place = {scope: column for column, scope in enumerate(self.scopes)}
        columns = [place[scope] for scope in scopes]
        n, total = self.n[:, columns], self.total[:, columns]
        return PromptSums(tuple(scopes), n, total, self.num_runs)


class Resampler:
    """Draws prompts again, the same way for every metric of a pair of runs."""

    def __init__(self, *run_ids: str) -> None:
        digest = hashlib.sha256(":".join(run_ids).encode()).digest()
        self._seed = int.from_bytes(digest[:8])
        self._drawn: dict[int, Matrix] = {}

    def counts(self, num_prompts: int) -> Matrix:
        """Return how often each prompt is drawn in each resample, [RESAMPLES, num_prompts]."""
        if num_prompts not in self._drawn:
            generator = np.random.default_rng(self._seed)
            chosen = generator.integers(num_prompts, size=(RESAMPLES, num_prompts))
            chosen += num_prompts * np.arange(RESAMPLES)[:, None]
            counts = np.bincount(chosen.ravel(), minlength=RESAMPLES * num_prompts)
            self._drawn[num_prompts] = counts.reshape(RESAMPLES, -1).astype(np.float64)
        return self._drawn[num_prompts]


def compare(
    metric: str,
    now: PromptSums,
    before: PromptSums,
    noise_floor: Mapping[tuple[str, str], float],
    resampler: Resampler,
    chosen_from: int = 1,
) -> Iterator[Comparison]:
    """Yield the comparison of every scope that both runs have, in the order of this one.

    `before` is the best of `chosen_from` runs, 1 when it was not chosen by what it measured. Raises
    ValueError when the runs have another number of prompts: they are not comparable.
    """
    if len(now.n) != len(before.n):
        raise ValueError(f"{metric}: {len(now.n)} prompts against {len(before.n)}")
    known = set(before.scopes)
    shared = [scope for scope in now.scopes if scope in known]
    now, before = now.at(shared), before.at(shared)
    floors = np.array([_finite(noise_floor.get((metric, scope), 0.0)) for scope in shared])
    luck = _luck(chosen_from) / math.sqrt(1 / now.num_runs + 1 / before.num_runs)
    found: dict[int, Comparison] = {}
    for columns, rows in _groups((now.n > 0) & (now.n == before.n)):
        part = _Part(now, before, rows, columns)
        for column, numbers in zip(columns, part.tests(floors[columns], resampler), strict=True):
            lost = tuple(np.flatnonzero(now.n[:, column] != before.n[:, column]).tolist())
            test = Comparison(metric, shared[column], len(rows), *numbers[:5])
            found[column] = replace(test, lost=lost, handicap=luck * numbers[5], se=numbers[6])
    yield from (found[column] for column in sorted(found))


def _groups(both: NDArray[np.bool_]) -> Iterator[tuple[list[int], NDArray[np.intp]]]:
    """Yield columns measured on the same prompts together, with those prompts; none is left out."""
    groups: dict[bytes, list[int]] = {}
    for column in range(both.shape[1]):
        groups.setdefault(both[:, column].tobytes(), []).append(column)
    for columns in groups.values():
        yield columns, np.flatnonzero(both[:, columns[0]])


class _Part:
    """Some scopes on the prompts that both runs have. G prompts, K scopes."""

    def __init__(
        self, now: PromptSums, before: PromptSums, rows: NDArray[np.intp], columns: list[int]
    ) -> None:
        place = np.ix_(rows, np.array(columns, dtype=np.intp))
        self.n = now.n[place]
        self.changes = (now.total - before.total)[place]
        weight = np.maximum(self.n.sum(0), 1)
        self.value = now.total[place].sum(0) / weight
        self.baseline = before.total[place].sum(0) / weight
        self.difference = self.value - self.baseline
        self._weight = weight

    def tests(
        self, floors: Matrix, resampler: Resampler
    ) -> Iterator[tuple[float, float, float, float, float, float, float]]:
        """Yield value, baseline, low, high, p, standard error, and that to reckon with, by scope.

        The first standard error is 0 where no prompt changed, the other one never is.
        """
        if len(self.n) < MIN_SAMPLES:
            low, high = self._range(floors)
            p, se = np.ones(len(low)), np.zeros(len(low))
        else:
            se, least = self._errors(floors)
            low, high = self._interval(least, resampler)
            p = student.two_sided(self.difference / se, len(self.n) - 1)
        same, reckoned = ~self.changes.any(0), se
        low, high, se = (np.where(same, 0, each) for each in (low, high, se))
        columns = (self.value, self.baseline, low, high, np.where(same, 1, p), se, reckoned)
        yield from zip(*(column.tolist() for column in columns), strict=True)

    def _errors(self, floors: Matrix) -> tuple[Matrix, Matrix]:
        """Return the standard errors, clustered by prompt, and the least that is believed."""
        num_prompts = len(self.n)
        residuals = self.changes - self.n * self.difference
        factor = num_prompts / (num_prompts - 1)
        se = np.sqrt(factor * np.square(residuals).sum(0)) / self._weight
        least = floors * np.sqrt(np.square(self.n).sum(0)) / self._weight
        rounding = _ROUNDING * np.maximum(np.abs(self.value), np.abs(self.baseline))
        least = np.maximum(least, np.maximum(rounding, np.finfo(np.float64).tiny))
        return np.maximum(se, least), least

    def _interval(self, least: Matrix, resampler: Resampler) -> tuple[Matrix, Matrix]:
        num_prompts = len(self.n)
        counts = resampler.counts(num_prompts)
        drawn = (counts @ self.changes) / (counts @ self.n)
        t = student.quantile(CONFIDENCE, num_prompts - 1)
        tail = NormalDist().cdf(-math.sqrt(num_prompts / (num_prompts - 1)) * t)
        low, high = np.quantile(drawn, (tail, 1 - tail), axis=0)
        margin = t * least
        return (
            np.minimum(low, self.difference - margin),
            np.maximum(high, self.difference + margin),
        )

    def _range(self, floors: Matrix) -> tuple[Matrix, Matrix]:
        """Return the smallest and the largest difference of any prompt, widened by the floor."""
        if not len(self.n):
            return np.full(len(floors), -np.inf), np.full(len(floors), np.inf)
        each = self.changes / self.n
        return each.min(0) - floors, each.max(0) + floors


def _luck(chosen_from: int) -> float:
    """Return the expected best of so many standard normal draws."""
    return NormalDist().inv_cdf((chosen_from - 0.375) / (chosen_from + 0.25))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
