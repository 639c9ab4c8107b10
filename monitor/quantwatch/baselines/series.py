"""All numbers of one candidate against its baseline, the derived ones that rules name included."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from quantwatch.baselines.paired import Matrix, PromptSums, Resampler, compare
from quantwatch.domain import Comparison, Scope

Evidence = Callable[[str], "tuple[tuple[Scope, ...], Sequence[Matrix]] | None"]
"""Metric → scopes and the `per_prompt` blocks of one or several runs; None: not measured."""
SOURCES = {"ppl_ratio": "nll_difference", "rms_delta_p": "delta_p"}
"""Numbers that rules name and that follow from the sums of another metric."""


def compare_candidate(
    metrics: Iterable[str],
    now: Evidence,
    before: Evidence,
    noise_floor: Mapping[tuple[str, str], float],
    resampler: Resampler,
    chosen_from: int = 1,
) -> dict[tuple[str, str], Comparison]:
    """Return the comparison of every metric and scope of which both runs have prompt sums.

    The baseline is the best of `chosen_from` runs.
    """
    test = partial(compare, noise_floor=noise_floor, resampler=resampler, chosen_from=chosen_from)
    return {
        (metric, each.scope): each
        for metric in metrics
        for each in _comparisons(metric, now, before, test)
    }


def _comparisons(
    metric: str, now: Evidence, before: Evidence, test: Callable[..., Iterator[Comparison]]
) -> Iterator[Comparison]:
    source, squares = SOURCES.get(metric, metric), metric == "rms_delta_p"
    ours, theirs = now(source), before(source)
    if ours is None or theirs is None:
        return
    sums = [PromptSums.over(*each, squares=squares) for each in (ours, theirs)]
    found = test(source, *sums, noise_floor={}) if squares else test(source, *sums)
    yield from (found if source == metric else (_derived(metric, each) for each in found))


def _derived(metric: str, comparison: Comparison) -> Comparison:
    """Carry a comparison of means through the increasing function that gives the number."""
    function = _ratio if metric == "ppl_ratio" else _root
    start = function(comparison.baseline)
    low, high, handicap, se = (
        function(comparison.baseline + each) - start
        for each in (comparison.low, comparison.high, comparison.handicap, comparison.se)
    )
    moved = replace(comparison, low=low, high=high, handicap=handicap, se=se)
    return replace(moved, metric=metric, value=function(comparison.value), baseline=start)


def _ratio(mean_nll_difference: float) -> float:
    try:
        return math.exp(mean_nll_difference)
    except OverflowError:
        return math.inf


def _root(mean_square: float) -> float:
    return math.sqrt(max(mean_square, 0.0))
