"""docs/metrics.md says of every metric what metrics/registry.py says, and nothing else."""

import math
import re
from pathlib import Path

from quantwatch.config.rules import DERIVED
from quantwatch.metrics.registry import METRICS, MetricSpec

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
PLACES = {
    "model": "model",
    "layer": "layers",
    "tap": "every tap",
    "isolated": "every tap and linear",
    "router": "layers with experts",
}


def best(value: float) -> str:
    return "+∞" if math.isinf(value) else f"{value:g}"


def row(spec: MetricSpec) -> str:
    place = PLACES[spec.where] + (", model" if spec.slug.startswith("topk_logit") else "")
    formula = spec.formula.replace("|", "\\|")
    value = "–" if spec.direction == "neutral" else best(spec.best_value)
    return (
        f"| `{spec.slug}` | {spec.title} | {spec.unit} | {spec.direction} | {value} | {place} "
        f"| {formula} |"
    )


def derived_rows() -> list[str]:
    return [
        f"| `{name}` | {d.title} | {best(d.best_value)} | {d.formula} |"
        for name, d in DERIVED.items()
    ]


def rows_of(section: str) -> list[str]:
    found = re.search(rf"^## {section}$(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    assert found, f"docs/metrics.md has no section {section!r}"
    return [line for line in found.group(1).splitlines() if line.startswith("| `")]


def test_every_metric_is_listed_as_registered() -> None:
    """Catches a metric without a word, and a formula or direction that the page got wrong."""
    assert rows_of("All metrics") == [row(spec) for spec in METRICS.values()]


def test_derived_numbers_are_listed() -> None:
    """Catches a number that rules may use and nobody explains."""
    assert rows_of("Derived numbers") == derived_rows()
