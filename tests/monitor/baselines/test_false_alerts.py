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
    # As `python benchmarks/false_alerts.py` does: its other half lies beside it.
    sys.path.insert(0, str(FILE.parent))
    spec = importlib.util.spec_from_file_location("false_alerts", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["false_alerts"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(FILE.parent))
    for name in ("false_alerts", "simulated_alerts"):
        del sys.modules[name]


def test_nights_without_a_change_are_quiet_and_a_shift_is_found(simulation: Any) -> None:
    """Catches a rule that cries wolf, and one that never speaks."""
    world = replace(simulation.World(), nights=15, series=60, prompts=64)
    for found in simulation.simulate(world, repeats=4)["rules"]:
        assert found["most_false_alerts"] <= 1
        if not found["closed_by_hand"]:
            continue  # a minimum effect of 2 σ: only what is beyond it is to be found
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


UNLUCKY = 4.0
"""By how many σ a series of the baseline is too good; every night of it looks worse."""


@pytest.mark.parametrize(("anchored", "fewest", "most"), [(True, 1, 1), (False, 3, 25)])
def test_an_unlucky_baseline_is_told_of_once(
    simulation: Any, monkeypatch: pytest.MonkeyPatch, anchored: bool, fewest: int, most: int
) -> None:
    """Catches a series that comes back as often as somebody closes its alert."""
    if not anchored:
        monkeypatch.setattr(sys.modules["simulated_alerts"], "good_runs", lambda *_: {})
    world = replace(simulation.World(), series=40, prompts=64)
    shift = np.zeros(40)
    shift[0] = UNLUCKY
    machine = simulation.Machine(world, 3, shift)
    fired = sum(machine.night()[0] for _ in range(25))
    assert fewest <= fired <= most


@pytest.mark.parametrize("seed", range(3))
def test_what_was_repaired_is_found_when_it_is_back(simulation: Any, seed: int) -> None:
    """Catches an alert that stays closed for ever, because it was closed while it was true."""
    world = replace(simulation.World(), series=40, prompts=64)
    assert all(simulation.found_again(world, 7.0, seed))


def test_drift_since_an_alert_was_closed_adds_up(simulation: Any) -> None:
    """Catches a comparison that creeps: half a σ a night is never much more than the night before."""
    world = replace(simulation.World(), series=40, prompts=64)
    shift = np.zeros(40)
    shift[0] = 6.0
    machine = simulation.Machine(world, 4, shift)
    assert machine.night()[0]
    told = []
    for night in range(14):
        machine.shift(shift + np.eye(1, 40)[0] * 0.5 * night)
        told.append(machine.night()[0])
    assert not any(told[:3])
    assert any(told)


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
