"""Which changes are established: false-discovery control, and a second look by a confirmation run.

A run is judged at 5 % per direction over everything that its rules judge. All nights share the
baseline's own noise, so a series that was unlucky in the baseline looks changed again and again. A
confirmation run therefore is no second vote: its values are pooled with those of the run that it
confirms, the pooled difference has to be established at 0.4 %, and the run has to lean the same way
on its own, so that one freak measurement cannot confirm itself. benchmarks/
false_alerts.py shows what comes of it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from quantwatch.baselines.discovery import FALSE_DISCOVERIES, discoveries
from quantwatch.domain import Comparison, Scope

Key = tuple[str, str, str]
"""Candidate, metric as rules name it, scope."""
CONFIRMED = 0.004
"""Rate for the pooled values of a confirmation run."""
LEANING = 0.05
"""One-sided p that a confirmation run needs on its own."""


def established(
    family: Mapping[Key, Comparison], alone: Mapping[Key, Comparison] | None = None
) -> dict[Key, Comparison]:
    """Return the comparisons with q, and with the direction of every established change.

    `family` is everything that the rules of a run judge, over all candidates, metrics and scopes;
    pooled with the earlier run when a run confirms one, and `alone` is the run by itself then.
    What rests on too few prompts, has lost some, or has no p takes no part.
    """
    judged = {k: c for k, c in family.items() if _takes_part(c)}
    rates = dict(zip(judged, discoveries(list(judged.values())), strict=True))
    limit = FALSE_DISCOVERIES if alone is None else CONFIRMED
    decided = dict(family)
    for key, q in rates.items():
        clear = q <= limit and (alone is None or _leans(alone.get(key), judged[key]))
        decided[key] = replace(judged[key], q=q, established=_sign(judged[key]) if clear else 0)
    return decided


def since_good(found: Iterable[Comparison], *, pooled: bool) -> dict[Scope, Comparison]:
    """Return by scope what was compared with the runs in which it was last found good, with the
    direction of what has changed since then.

    The few series that were told of before are asked one by one, one-sided: at 5 %, and pooled with
    the run that is confirmed at 0.4 %. What rests on too few prompts, or has lost some, is left
    out: of that nothing is known.
    """
    limit = CONFIRMED if pooled else LEANING
    return {
        each.scope: replace(each, established=_sign(each) if each.p / 2 <= limit else 0)
        for each in found
        if _takes_part(each)
    }


def _takes_part(comparison: Comparison) -> bool:
    """One p that is no number would make every q none."""
    return comparison.is_enough and not comparison.lost and math.isfinite(comparison.p)


def _leans(alone: Comparison | None, pooled: Comparison) -> bool:
    """Say whether a run's own change goes the way of the pooled one."""
    return alone is not None and alone.p / 2 <= LEANING and _sign(alone) == _sign(pooled)


def _sign(comparison: Comparison) -> int:
    return (comparison.difference > 0) - (comparison.difference < 0)
