"""The minimum detectable effect: how small a change a paired test would still have found.

A rule on a baseline breaches when the lower bound of the difference's interval lies beyond what is
allowed, and when the difference is established among all m that are judged. With G prompts and the
standard error se of the difference, D has to pass

    limit = max(allowed + t(97.5 %)·se, t(1 − q/m)·se)

(quantiles of Student's t with G − 1 degrees of freedom; the interval is two-sided at 95 %, q the
rate of false discoveries, and one change alone among m is the case in which Benjamini and Hochberg
ask for most). A true change δ gives D ≥ limit with probability `power` when

    δ = limit + t(power)·se,

the "minimum detectable effect" of Bloom (1995, Evaluation Review 19(5), 547–556), in which the
multiplier is the same sum of two t quantiles. It takes the change to be the same on every prompt:
one that differs from prompt to prompt widens se, and takes more. Where nothing was tested the limit
is fixed, and se is the noise floor: no larger difference was seen between two runs of one model.
"""

from dataclasses import dataclass
from statistics import NormalDist

from quantwatch.baselines import student
from quantwatch.baselines.discovery import FALSE_DISCOVERIES
from quantwatch.baselines.paired import CONFIDENCE

POWER = 0.8
"""Of all nights with a change of that size, so many find it."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What a paired difference has to pass, and how large a change does so in `POWER` of nights."""

    limit: float
    change: float


def paired_effort(
    allowed: float,
    se: float,
    num_prompts: int,
    num_judged: int = 1,
    rate: float = FALSE_DISCOVERIES,
) -> Effort:
    """Return what it takes to breach a rule on a baseline; all in the unit of the metric.

    `se` is of the paired difference. Raises ValueError below two prompts, for nothing judged, and
    for negative numbers.
    """
    if num_prompts < 2 or num_judged < 1:
        raise ValueError(f"{num_prompts} prompts and {num_judged} judged; allowed: ≥ 2 and ≥ 1")
    if not (allowed >= 0 and se >= 0 and 0 < rate < 0.5):
        raise ValueError(f"allowed {allowed}, se {se}, rate {rate}; allowed: ≥ 0, ≥ 0, 0 < · < 0.5")
    freedom = num_prompts - 1
    beyond = allowed + student.quantile(CONFIDENCE, freedom) * se
    established = student.quantile(1 - 2 * rate / num_judged, freedom) * se
    limit = max(beyond, established)
    # One-sided: P(T ≤ t) = power is P(|T| ≤ t) = 2·power − 1.
    return Effort(limit, limit + student.quantile(2 * POWER - 1, freedom) * se)


def fixed_effort(distance: float, noise: float) -> float:
    """Return the change that passes a fixed limit at such a distance in `POWER` of the nights.

    `noise` is the standard deviation between two runs that measure the same. 0 when the limit is
    passed already: the rule breaches with no change at all.
    """
    return max(0.0, distance + NormalDist().inv_cdf(POWER) * noise)
