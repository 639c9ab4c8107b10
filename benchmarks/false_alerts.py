"""How often the service cries wolf, and how fast it finds a real change. Prints JSON.

Simulated are nights of one check whose rule judges many series against one baseline: measurements
are drawn at random, everything else is the service's own code (paired tests, false-discovery
control, rule, what re-opens an alert, confirmation run, alert state machine). The noise of a pinned
baseline is common to all nights. σ is the standard error of the paired difference. Several rules
watch the same nights. One with a small minimum effect leaves no night clear, and an alert that
can't clear fires only once: so its alert is closed by hand as soon as it fires, and every message
is counted. The alert of a rule with a minimum effect of 2 σ is left alone, to resolve by itself.

- false alerts: nights on which nothing has changed; a repeat may have at most one message;
- found: a shift that stays from the first night on, in one or in several series, fires within two
  nights;
- found again: a shift that was told of, closed by hand while it was there, repaired, and comes back
  after a week fires within two nights;
- both directions: established increases and decreases on the nights on which nothing has changed.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simulated_alerts import METRIC, NAME, Night, Watch, mean_of, pooled_with, result_of

from quantwatch.alerts.episodes import RunRef
from quantwatch.baselines.decision import Key, established, since_good
from quantwatch.baselines.paired import PromptSums, Resampler, compare
from quantwatch.domain import Baseline, Comparison, Scope

MEAN = 0.05
NIGHTS_TO_FIND = 2
NIGHTS_REPAIRED = 7
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class World:
    """What is simulated."""

    nights: int = 60
    series: int = 200
    prompts: int = 128
    heavy: bool = False
    """Student's t with 5 degrees of freedom instead of normal noise."""
    shared: bool = True
    """Whether the baseline stays; otherwise every night is compared with a fresh one."""
    window: int = 0
    """Runs of a rolling baseline that is full already; 0: one run is pinned."""
    rules: tuple[tuple[float, bool], ...] = ((0.0, True), (1.0, True), (2.0, False))
    """Minimum effect in σ, and whether the alert is closed by hand as soon as it fires."""


class Machine:
    """One check: its noise, its baseline, its rules."""

    def __init__(self, world: World, seed: int, shift: Matrix | None = None) -> None:
        self._world = world
        self._rng = np.random.default_rng(seed)
        self._scopes = tuple(Scope(f"layers.{number}") for number in range(world.series))
        self._tokens = self._rng.integers(16, 65, (world.prompts, 1)).astype(np.float64)
        self._level = MEAN * self._rng.lognormal(0, 0.5, (world.prompts, world.series))
        self._seed = seed
        self._sums: dict[str, PromptSums] = {}
        self._good = [self._measure(np.zeros(world.series)) for _ in range(max(world.window, 1))]
        self._baseline = mean_of(self._good)
        self._sigma = sigma = np.sqrt((1 + 1 / len(self._good)) / self._tokens.sum())
        self._shift = np.zeros(world.series) if shift is None else shift * sigma
        self.watches = [
            Watch(effect * float(sigma), by_hand=by_hand) for effect, by_hand in world.rules
        ]
        self.rises = self.falls = 0

    def repair(self) -> None:
        """Let nothing be shifted any more, until further notice; alerts are closed by hand."""
        self._shift = np.zeros(self._world.series)
        for watch in self.watches:
            watch.close()

    def shift(self, shift: Matrix) -> None:
        """Shift the series by so many σ from the next night on."""
        self._shift = shift * self._sigma

    def night(self) -> list[bool]:
        """Run one night, with a confirmation run if a rule asks for one; say which rules fire."""
        if not self._world.shared:
            self._baseline = self._measure(np.zeros(self._world.series))
        first = self._measure(self._shift)
        moves = self._judge(first, None)
        if any(asked for _, asked in moves):
            moves += self._judge(self._measure(self._shift), first)
        elif self._world.window:
            self._good = [*self._good[1:], first]
            self._baseline = mean_of(self._good)
        count = len(self.watches)
        return [any(fired for fired, _ in moves[place::count]) for place in range(count)]

    def _measure(self, shift: Matrix) -> Night:
        """Return the sums of a run: the noise of a prompt's mean falls with its tokens."""
        shape = self._level.shape
        if self._world.heavy:
            noise = self._rng.standard_t(5, shape) / np.sqrt(5 / 3)
        else:
            noise = self._rng.standard_normal(shape)
        means = self._level + shift + noise / np.sqrt(self._tokens)
        n = np.broadcast_to(self._tokens, shape)
        run_id = f"{self._seed}-{len(self._sums) + 1}"
        self._sums[run_id] = PromptSums(self._scopes, n, n * means)
        return Night(run_id, self._sums[run_id])

    def _judge(self, run: Night, confirmed: Night | None) -> list[tuple[bool, bool]]:
        """Return of every rule whether it fires in this run, and whether it wants it confirmed."""
        alone = None if confirmed is None else self._tests(run)
        tests = established(self._tests(run, confirmed), alone)
        if confirmed is None:
            self.rises += any(each.established > 0 for each in tests.values())
            self.falls += any(each.established < 0 for each in tests.values())
        ref = RunRef(run.run_id, None if confirmed is None else confirmed.run_id)
        before = result_of(self._baseline.sums)
        against = Baseline(
            before.name, None, None, before.measurements,
            comparisons={key[1:]: each for key, each in tests.items()},
        )  # fmt: skip
        since = partial(self._since, run, confirmed)
        now = result_of(run.sums)
        name = self._baseline.run_id
        return [watch.take(now, (name, against), ref, since) for watch in self.watches]

    def _since(
        self, run: Night, confirmed: Night | None, runs: Sequence[str]
    ) -> dict[Scope, Comparison]:
        """Return what has changed since the mean of some earlier runs."""
        good = mean_of([Night(each, self._sums[each]) for each in runs])
        found = compare(METRIC, pooled_with(run, confirmed), good.sums, {}, Resampler(*runs))
        return since_good(found, pooled=confirmed is not None)

    def _tests(self, run: Night, pooled: Night | None = None) -> dict[Key, Comparison]:
        resampler = Resampler(self._baseline.run_id, run.run_id)
        found = compare(METRIC, pooled_with(run, pooled), self._baseline.sums, {}, resampler)
        return {(NAME, METRIC, each.scope): each for each in found}


def false_alerts(world: World, seed: int) -> tuple[list[int], int, int]:
    """Return how often each rule fires without a change, and nights with rises and falls."""
    machine = Machine(world, seed)
    nights = [machine.night() for _ in range(world.nights)]
    return [sum(fired) for fired in zip(*nights, strict=True)], machine.rises, machine.falls


def found(world: World, shifted: int, size: float, seed: int) -> list[bool]:
    """Say of each rule whether a shift of `size` σ in so many series fires within two nights."""
    shift = np.zeros(world.series)
    shift[:shifted] = size
    machine = Machine(world, seed, shift)
    nights = [machine.night() for _ in range(NIGHTS_TO_FIND)]
    return [any(fired) for fired in zip(*nights, strict=True)]


def found_again(world: World, size: float, seed: int) -> list[bool]:
    """Say of each rule whether a shift of one series that was repaired fires when it is back."""
    shift = np.zeros(world.series)
    shift[0] = size
    machine = Machine(world, seed, shift)
    for _ in range(NIGHTS_TO_FIND):
        machine.night()
    machine.repair()
    for _ in range(NIGHTS_REPAIRED):
        machine.night()
    machine.shift(shift)
    nights = [machine.night() for _ in range(NIGHTS_TO_FIND)]
    return [any(fired) for fired in zip(*nights, strict=True)]


def simulate(world: World, repeats: int, jobs: int = 1) -> dict[str, Any]:
    """Return the share of repeats that keep each promise, and how it came about."""
    with ProcessPoolExecutor(jobs) as pool:
        spread: Callable[..., Any] = pool.map if jobs > 1 else map
        seeds = range(repeats)
        nights = list(spread(partial(false_alerts, world), seeds))
        one = list(spread(partial(found, world, 1, 5.0), seeds))
        ten = list(spread(partial(found, world, 10, 3.0), seeds))
        again = list(spread(partial(found_again, world, 5.0), seeds))
    counts = zip(*(fired for fired, _, _ in nights), strict=True)
    shares = (zip(*each, strict=True) for each in (one, ten, again))
    rules = zip(world.rules, counts, *shares, strict=True)
    return {
        "world": asdict(world),
        "repeats": repeats,
        "rules": [_promises(*each) for each in rules],
        "nights_with_established_increases": sum(rises for _, rises, _ in nights),
        "nights_with_established_decreases": sum(falls for _, _, falls in nights),
    }


def _promises(
    rule: tuple[float, bool],
    counts: Sequence[int],
    one: Sequence[bool],
    ten: Sequence[bool],
    again: Sequence[bool],
) -> dict[str, Any]:
    """Return how one rule did in all repeats."""
    repeats = len(counts)
    return {
        "min_effect_in_sigma": rule[0],
        "closed_by_hand": rule[1],
        "at_most_one_false_alert": sum(count <= 1 for count in counts) / repeats,
        "false_alerts_per_repeat": sum(counts) / repeats,
        "most_false_alerts": max(counts),
        "found_5_sigma_in_one_series": sum(one) / repeats,
        "found_3_sigma_in_ten_series": sum(ten) / repeats,
        "found_5_sigma_again": sum(again) / repeats,
    }


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=World().prompts)
    parser.add_argument("--heavy", action="store_true", help="heavy-tailed noise")
    parser.add_argument("--window", type=int, default=0, help="runs of a rolling baseline")
    parser.add_argument("--fresh", action="store_true", help="a fresh baseline every night")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    world = World(
        prompts=given.prompts, heavy=given.heavy, shared=not given.fresh, window=given.window
    )
    print(json.dumps(simulate(world, given.repeats, given.jobs), indent=1, allow_nan=False))


if __name__ == "__main__":
    main()
