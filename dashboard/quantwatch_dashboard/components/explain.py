"""Hover cards: what a metric is, in a sentence, from the one table of metrics."""

import math
from collections.abc import Mapping

from quantwatch.metrics.registry import METRICS, MetricSpec
from quantwatch_dashboard.components import markup
from quantwatch_dashboard.components.markup import Html, tag

_BETTER = {
    "lower": "Lower is better",
    "higher": "Higher is better",
    "neutral": "Neither way is better",
}


def sentence(slug: str) -> str:
    """Return what a metric is: formula, unit, which way is better. Empty for one not known."""
    spec = METRICS.get(slug)
    return _sentence(spec) if spec is not None else ""


def _sentence(spec: MetricSpec) -> str:
    unit = "" if spec.unit == "1" else f" In {spec.unit}."
    best = "" if spec.direction == "neutral" else f", best is {_best(spec.best_value)}"
    return f"{spec.title}: {spec.formula}.{unit} {_BETTER[spec.direction]}{best}."


def _best(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else "+∞"


def numbers(columns: Mapping[str, str]) -> list[Html]:
    """Return headers of columns of numbers; each name is explained by a metric, "" by none."""
    return markup.numbers(*(term(slug, name) if slug else name for name, slug in columns.items()))


def term(slug: str, shown: object = None) -> Html:
    """Return a metric's name with a card that explains it on hover and on focus."""
    spec = METRICS.get(slug)
    if spec is None:
        return tag("span", slug if shown is None else shown)
    return explained(spec.title if shown is None else shown, _sentence(spec))


def explained(shown: object, why: str) -> Html:
    """Return a word with a card that explains it on hover and on focus."""
    card = tag("span", why, class_="qw-card", role="tooltip")
    return tag("span", shown, card, class_="qw-term", tabindex="0")
