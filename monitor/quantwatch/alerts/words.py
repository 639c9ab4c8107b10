"""Alerts as sentences."""

import math

from quantwatch.config.rules import DERIVED
from quantwatch.metrics.registry import METRICS

_KINDS = {"nan": "NaN", "posinf": "+∞", "neginf": "−∞"}


def number(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:.3g}" if math.isfinite(value) else ("NaN" if math.isnan(value) else "∞")


def times(ratio: float) -> str:
    """Return a factor: 14 ×."""
    return f"{number(ratio)} ×"


def title(metric: str, statistic: str = "mean") -> str:
    """Return a metric in words; a mean goes without saying."""
    spec = DERIVED.get(metric) or METRICS[metric]
    return spec.title if statistic == "mean" else f"{spec.title} ({statistic})"


def kind_sign(kind: str) -> str:
    """Return the sign of a non-finite value."""
    return _KINDS[kind]
