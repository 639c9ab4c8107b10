"""Names of metrics as pages and pictures say them, the derived ones and unknown ones included."""

from typing import NamedTuple

from quantwatch.metrics.registry import METRICS


class Statistic(NamedTuple):
    """What a trend shows: one statistic of a metric at a place."""

    metric: str
    scope: str
    name: str


PPL_RATIO = "ppl_ratio"


def title(metric: str) -> str:
    """Return a metric's name."""
    if metric == PPL_RATIO:
        return "Perplexity ratio"
    return METRICS[metric].title if metric in METRICS else metric


def axis(metric: str, statistic: str = "") -> str:
    """Return what stands at an axis: ``Output KL, mean, nats``; a plain number has no unit."""
    unit = METRICS[metric].unit if metric in METRICS else "1"
    return ", ".join(word for word in (title(metric), statistic, unit) if word not in ("", "1"))
