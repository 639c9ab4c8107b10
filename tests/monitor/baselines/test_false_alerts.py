"""The promises about false alerts, kept by the service's own decision code on simulated nights.

`benchmarks/false_alerts.py` prints the full figures (200 repeats of 60 nights × 200 series).
"""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantwatch.baselines import decision

FILE = Path(__file__).parents[3] / "benchmarks" / "false_alerts.py"


@pytest.fixture(scope="module")
def simulation() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("false_alerts", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["false_alerts"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["false_alerts"]


def test_nights_without_a_change_are_quiet_and_a_shift_is_found(simulation: Any) -> None:
    """Catches a rule that cries wolf, and one that never speaks."""
    world = replace(simulation.World(), nights=15, series=60, prompts=64)
    for found in simulation.simulate(world, repeats=4)["rules"]:
        assert found["most_false_alerts"] <= 1
        assert found["found_5_sigma_in_one_series"] == 1
        assert found["found_3_sigma_in_ten_series"] == 1


def test_without_control_the_promise_breaks(
    simulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a simulation that can't fail, such as an alert that fires once and never clears."""
    for limit in ("FALSE_DISCOVERIES", "CONFIRMED", "LEANING"):
        monkeypatch.setattr(decision, limit, 1.0)
    world = replace(simulation.World(), nights=6, series=60, prompts=64)
    assert simulation.false_alerts(world, 0)[0][0] > 1


def test_without_a_confirmation_rate_of_its_own_the_promise_breaks(
    simulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a confirmation run that is a second vote against the same unlucky baseline."""
    monkeypatch.setattr(decision, "CONFIRMED", 0.5)
    world = replace(simulation.World(), nights=40, series=60, prompts=32)
    fired = [simulation.false_alerts(world, seed)[0][0] for seed in range(4)]
    assert max(fired) > 1


def test_deterministic_models_never_alert(simulation: Any) -> None:
    """Catches a difference of exactly 0 that is tested like noise."""
    machine = simulation.Machine(replace(simulation.World(), series=20, prompts=16), 1)
    same = machine._baseline
    machine._measure = lambda _: replace(same, run_id="again")
    assert not any(any(machine.night()) for _ in range(5))
    assert (machine.rises, machine.falls) == (0, 0)


def test_a_freak_run_does_not_fire(simulation: Any) -> None:
    """Catches one bad night (another job on the card) that wakes somebody: N6, B18."""
    world = replace(simulation.World(), series=40, prompts=64)
    shift = np.zeros(40)
    shift[0] = 40.0
    machine = simulation.Machine(world, 3, shift)
    freak, calm = machine._measure(machine._shift), machine._measure(np.zeros(40))
    assert set(machine._judge(freak, None)) == {(False, True)}
    assert set(machine._judge(calm, freak)) == {(False, False)}
    assert {watch.state.state for watch in machine.watches} == {"inactive"}


@pytest.mark.slow
def test_increases_and_decreases_are_found_equally_often(simulation: Any) -> None:
    """Catches N26 (folo-rs/folo#429): against fresh baselines both are a fair coin's two sides."""
    world = replace(simulation.World(), nights=40, series=40, prompts=32, shared=False)
    counts = [simulation.false_alerts(world, seed)[1:] for seed in range(20)]
    rises, falls = (sum(each[side] for each in counts) for side in (0, 1))
    assert rises + falls > 20
    assert abs(rises - falls) <= 3 * np.sqrt(rises + falls)
    # 5 % of nights per direction at most: no more than the rate promises
    assert (rises + falls) / 2 / (20 * 40) < 0.07
