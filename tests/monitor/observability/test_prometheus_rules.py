"""docs/prometheus-rules.yml and docs/operations.md speak of meters that exist, and of all of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantwatch.observability import meters

ROOT = Path(__file__).parents[3]
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "docs/prometheus-rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
FAMILIES = {family.name: family for family in meters.REGISTRY.collect()}
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
EXPOSED = {
    f"{name}{suffix}" for name, family in FAMILIES.items() for suffix in SUFFIXES[family.type]
}
OURS = {name for name in EXPOSED if name.startswith("quantwatch_")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_metric_of_a_rule_exists(rule: dict[str, Any]) -> None:
    """Catches a rule that never fires because a meter was renamed."""
    named = set(re.findall(r"quantwatch_\w+", rule["expr"]))
    assert named
    assert named <= OURS
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_label_of_a_rule_exists(rule: dict[str, Any]) -> None:
    """Catches a label that the meter does not have: such a sum is always empty."""
    named = re.findall(r"(quantwatch_\w+)\{(\w+)", rule["expr"])
    labels = {label for _, label in named}
    grouped = re.findall(r"by \(([\w, ]+)\)", rule["expr"])
    labels |= {label.strip() for text in grouped for label in text.split(",")} - {"le"}
    known = {name for meter in vars(meters).values() for name in getattr(meter, "_labelnames", ())}
    assert labels <= known


def test_the_alerts_of_the_specification_are_there() -> None:
    """Catches the article's alert, the dead man or the waiting message that got lost."""
    text = " ".join(rule["expr"] for rule in RULES)
    assert re.search(r"histogram_quantile\(0\.99,.*retry_latency_seconds_bucket.* > 3", text)
    assert "quantwatch_last_success_timestamp_seconds" in text
    assert re.search(r"oldest_pending_seconds\) > 15 \* 60", text)


def test_a_retry_latency_of_three_seconds_is_a_bucket() -> None:
    """Catches buckets between which a P99 of 3 s would be guessed."""
    assert 3 in meters.RETRY_LATENCY._upper_bounds


def test_every_meter_is_explained() -> None:
    """Catches a meter that nobody can look up, and one that is explained but gone."""
    page = (ROOT / "docs/operations.md").read_text()
    named = set(re.findall(r"^\| `(quantwatch_\w+)", page, re.MULTILINE))
    families = {
        f"{name}_total" if FAMILIES[name].type == "counter" else name
        for name in FAMILIES
        if name.startswith("quantwatch_")
    }
    assert named == families
