"""What a number is compared with, and within which a change is none."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quantwatch.config.default_rules import DEFAULT_RULES
from quantwatch.domain import Json

_NOISE_FLOORS = 3
_DECIDING = "baseline-kl"
"""The rule that judges the headline against the baseline."""


@dataclass(frozen=True, slots=True)
class Band:
    """What a statistic is compared with, in its own unit: a change within it is no regression."""

    baseline: float
    low: float
    high: float


def headline_band(
    baseline: float | None, floors: Iterable[float | None], config: Json, candidate: str
) -> Band | None:
    """Return what the rule on the headline allows: its least effect, or three noise floors."""
    if baseline is None or not math.isfinite(baseline):
        return None
    noise = _NOISE_FLOORS * (_newest(floors) or 0.0)
    half = max(_least_effect(config, candidate), noise)
    return Band(baseline, max(0.0, baseline - half), baseline + half)


def noise_band(
    baseline: float | None, floors: Iterable[float | None], *, is_log: bool
) -> tuple[float, float] | None:
    """Return baseline ± three noise floors of the newest run that has one; None without either."""
    newest = _newest(floors)
    if baseline is None or newest is None or not math.isfinite(baseline):
        return None
    half = _NOISE_FLOORS * newest
    return max(baseline - half, 0.0 if is_log else -math.inf), baseline + half


def _newest(floors: Iterable[float | None]) -> float | None:
    return next(iter([floor for floor in floors if floor is not None][::-1]), None)


def _least_effect(config: Json, candidate: str) -> float:
    """Return `min_effect` of the rule: as the candidate has it, the check, or by default."""
    own = [c.get("rules", ()) for c in config.get("candidates", ()) if c["name"] == candidate]
    for rules in (*own, config.get("rules", ())):
        for rule in rules:
            if rule["name"] == _DECIDING and rule.get("min_effect") is not None:
                return float(rule["min_effect"])
    default = next(rule for rule in DEFAULT_RULES if rule.name == _DECIDING)
    return default.min_effect or 0.0
