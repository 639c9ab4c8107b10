"""Every candidate of a run against its baseline, prompt by prompt, decided together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantwatch.baselines.decision import established
from quantwatch.baselines.differences import compares
from quantwatch.baselines.paired import Resampler
from quantwatch.baselines.series import Evidence, compare_candidate
from quantwatch.config.rules import RuleConfig
from quantwatch.config.scopes import matches
from quantwatch.domain import CandidateResult, Comparison, RunResult
from quantwatch.metrics.registry import METRICS
from quantwatch.pipeline.against import Against, Blocks, Found, together
from quantwatch.pipeline.measure import Measured

Tests = Mapping[tuple[str, str], Comparison]
Rules = Mapping[str, tuple[RuleConfig, ...]]


@dataclass(frozen=True, slots=True)
class Sides:
    """What is compared: this run's blocks, the baseline's, and those of the run it confirms."""

    run: RunResult
    now: Blocks
    against: Against
    earlier: tuple[RunResult, Blocks] | None = None


def measured_blocks(measured: Measured) -> Blocks:
    """Return how the blocks of the run that is being judged are found."""

    def found(candidate: str, metric: str) -> Found | None:
        block = measured.sink.per_prompt(candidate, metric)
        return None if block is None else together([block])

    return found


def tests_of(
    sides: Sides, results: Mapping[str, CandidateResult], rules: Rules
) -> dict[str, dict[tuple[str, str], Comparison]]:
    """Return each measured candidate's comparisons, decided over all that the rules judge.

    Metrics that no rule judges are compared too: told, and without part in any decision.
    """
    pooled = {name: is_pooled(sides, result) for name, result in results.items()}
    found = {
        name: _tests(sides, name, rules[name], pool=pool and sides.earlier is not None)
        for name, pool in pooled.items()
    }
    keys = [
        (name, *key) for name, tests in found.items() for key in tests if _judged(key, rules[name])
    ]
    family = {(name, metric, scope): found[name][metric, scope] for name, metric, scope in keys}
    alone = _alone(sides, rules) if any(pooled.values()) else None
    for (name, metric, scope), decided in established(family, alone).items():
        found[name][metric, scope] = decided
    return found


def compared_with(
    sides: Sides, result: CandidateResult, metric: str, before: tuple[Sequence[str], Blocks]
) -> tuple[list[Comparison], bool]:
    """Return a metric's comparisons with the mean of some earlier runs, undecided, and whether this
    run is pooled with the one that it confirms.
    """
    run_ids, blocks = before
    pool = is_pooled(sides, result)
    now = _now(sides, result.name, sides.earlier if pool else None)
    found = compare_candidate(
        [metric],
        now,
        lambda source: blocks(result.name, source),
        sides.run.noise_floor,
        Resampler(*run_ids, sides.run.run_id),
    )
    return list(found.values()), pool


def _alone(sides: Sides, rules: Rules) -> dict[tuple[str, str, str], Comparison]:
    """Return a confirmation run's own comparisons."""
    return {
        (name, *key): comparison
        for name in rules
        for key, comparison in _tests(sides, name, rules[name], pool=False).items()
    }


def _tests(
    sides: Sides, name: str, rules: tuple[RuleConfig, ...], *, pool: bool
) -> dict[tuple[str, str], Comparison]:
    earlier = sides.earlier if pool else None
    resampler = Resampler(*sides.against.run_ids, sides.run.run_id)
    metrics = dict.fromkeys([*filter(compares, METRICS), *(r.metric for r in _paired(rules))])
    floor = sides.run.noise_floor
    both = _now(sides, name, earlier), _before(sides, name)
    return compare_candidate(metrics, *both, floor, resampler, sides.against.chosen_from)


def _now(sides: Sides, name: str, earlier: tuple[RunResult, Blocks] | None) -> Evidence:
    def evidence(metric: str) -> Found | None:
        ours = sides.now(name, metric)
        theirs = None if earlier is None else earlier[1](name, metric)
        if ours is None or theirs is None or ours[0] != theirs[0]:
            return ours
        return ours[0], [*ours[1], *theirs[1]]

    return evidence


def _before(sides: Sides, name: str) -> Evidence:
    return lambda metric: sides.against.blocks(name, metric)


def is_pooled(sides: Sides, result: CandidateResult) -> bool:
    """Say whether the run that is confirmed measured the very same candidate."""
    if sides.earlier is None or result.variant is None:
        return False
    other = sides.earlier[0].find(result.name)
    known = None if other is None else other.variant
    return known is not None and known.fingerprint == result.variant.fingerprint


def _judged(key: tuple[str, str], rules: tuple[RuleConfig, ...]) -> bool:
    metric, scope = key
    return any(r.metric == metric and matches(r.globs, scope) for r in _paired(rules))


def _paired(rules: tuple[RuleConfig, ...]) -> Iterator[RuleConfig]:
    return (r for r in rules if r.enabled and r.kind == "baseline" and r.statistic == "mean")
