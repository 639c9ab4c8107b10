"""Loads of experts: counts of all prompts first, numbers at the end."""

from pathlib import Path

import numpy as np
import pytest

from quantwatch.config.rules import RuleConfig
from quantwatch.domain import ExpertLoad, Observation, Prompt, Scope, Suite
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.metrics.floor import NoiseFloor
from quantwatch.metrics.loads import load_peak, load_shift

LAYER = Scope("layers.3")


def load(reference: list[int], candidate: list[int]) -> ExpertLoad:
    return ExpertLoad(LAYER, np.array(reference), np.array(candidate))


@pytest.mark.parametrize(
    ("one", "other", "shift", "peak"),
    [
        ([3, 1, 0], [3, 1, 0], 0.0, 2.25),
        ([4, 0], [0, 4], 1.0, 2.0),
        ([2, 2], [8, 8], 0.0, 1.0),
        ([1, 1, 2], [2, 1, 1], 0.25, 1.5),
    ],
    ids=["equal", "swapped", "other-total", "quarter"],
)
def test_shift_and_peak(one: list[int], other: list[int], shift: float, peak: float) -> None:
    """Catches a sum that isn't halved, counts in place of shares, and a peak over the total."""
    assert load_shift(np.array(one), np.array(other)) == pytest.approx(shift, abs=1e-15)
    assert load_peak(np.array(other)) == pytest.approx(peak, abs=1e-15)


def test_no_slot_is_nan() -> None:
    """Catches 0, the best value, where nothing could be counted."""
    assert np.isnan(load_shift(np.array([0, 0]), np.array([1, 2])))
    assert np.isnan(load_peak(np.array([0, 0])))


def test_prompts_are_counted_together(tmp_path: Path) -> None:
    """Catches a mean over prompts: each prompt alone is 1 apart, together they are equal."""
    prompts = tuple(Prompt(n, "c", "t", (5, 6), ()) for n in range(2))
    with Aggregator(Suite("s", "ab" * 32, prompts), tmp_path) as sink:
        for n, found in enumerate((load([2, 0], [0, 2]), load([0, 2], [2, 0]))):
            sink.observe(Observation("c", n, (), loads=(found,)))
        rows = {row.metric: row for row in sink.measurements("c")}
    assert set(rows) == {"router_load_tv", "router_load_max"}
    shift, peak = rows["router_load_tv"], rows["router_load_max"]
    assert (shift.scope, shift.n, shift.mean, shift.max, shift.se) == (LAYER, 1, 0.0, 0.0, None)
    assert (shift.max_prompt, shift.max_position) == (None, None)
    assert peak.mean == 1.0
    assert shift.method == "all positions together"


def test_the_floor_of_loads() -> None:
    """Catches rounding that moves loads and is told as a change; the peak has no floor."""
    floor = NoiseFloor()
    floor.observe(Observation("reference", 0, (), loads=(load([3, 1], [2, 2]),)))
    floor.observe(Observation("reference", 1, (), loads=(load([0, 0], [0, 0]),)))
    assert floor.values == {("router_load_tv", LAYER): 0.25}
    # One token goes elsewhere: 0.5 of this prompt, 1 of 8 slots of what is measured.
    floor.observe(Observation("reference", 2, (), loads=(load([2, 2], [3, 1]),)))
    assert floor.values == {("router_load_tv", LAYER): 0.0}
    floor.observe(Observation("threads", 0, (), loads=(load([3, 1], [2, 2]),)))
    assert floor.values == {("router_load_tv", LAYER): 0.25}


@pytest.mark.parametrize("scope", ["layers.*", "layers.3", "*"])
def test_rules_on_routers(scope: str) -> None:
    rule = RuleConfig(name="r", metric="router_overlap", scope=scope, threshold=0.9)
    assert rule.source == "router_overlap"


@pytest.mark.parametrize("scope", ["model", "head", "embedding", "layers.3.mlp"])
def test_rules_where_no_router_is(scope: str) -> None:
    """Catches a rule that can never find anything."""
    with pytest.raises(ValueError, match=r"never measured at .*; it is measured at layers\.\* \["):
        RuleConfig(name="r", metric="router_flips", scope=scope, threshold=0.9)
