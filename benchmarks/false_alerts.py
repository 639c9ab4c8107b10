"""How often the service cries wolf, and how fast it finds a real change. Prints JSON.

Simulated are nights of one check whose rule judges many series against one baseline: measurements
are drawn at random, everything else is the service's own code (paired tests, false-discovery
control, rule, confirmation run, alert state machine). The noise of a pinned baseline is common to
all nights. σ is the standard error of the paired difference. Rules with several minimum effects
watch the same nights. A small one leaves no night clear, and an alert that can't clear fires only
once: so every message is counted, as if somebody closed the alert as soon as it fires.

- false alerts: nights on which nothing has changed; a repeat may have at most one message;
- found: a shift that stays from the first night on, in one or in several series, fires within two
  nights;
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

from quantwatch.alerts.episodes import AlertState, Effect, Policy, RunRef, step
from quantwatch.alerts.outcomes import outcomes
from quantwatch.baselines.decision import Key, established
from quantwatch.baselines.paired import PromptSums, Resampler, compare
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Baseline, CandidateResult, Comparison, Measurement, RuleOutcome, Scope

METRIC = "rel_error"
MEAN = 0.05
NAME = "candidate"
NEGLIGIBLE = 1e-12
NIGHTS_TO_FIND = 2
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
    effects: tuple[float, ...] = (0.0, 1.0)
    """Minimum effects in σ, of a rule each."""


@dataclass(frozen=True, slots=True)
class Night:
    """A run, and the sums it measured."""

    run_id: str
    sums: PromptSums


class Watch:
    """A rule, and its alert that is closed whenever it has fired."""

    def __init__(self, min_effect: float) -> None:
        self.rule = RuleConfig(
            name="baseline", metric=METRIC, scope="layers.*", kind="baseline",
            min_effect=max(min_effect, NEGLIGIBLE),
        )  # fmt: skip
        self.state = AlertState()

    def take(self, outcome: RuleOutcome, run: RunRef) -> tuple[bool, bool]:
        """Return whether the alert fires, and whether it asks for a confirmation."""
        moved = step(self.state, outcome, run, Policy())
        fired = Effect.FIRED in moved.effects
        self.state = AlertState() if fired else moved.state
        return fired, Effect.CONFIRM in moved.effects


class Machine:
    """One check: its noise, its baseline, its rules."""

    def __init__(self, world: World, seed: int, shift: Matrix | None = None) -> None:
        self._world = world
        self._rng = np.random.default_rng(seed)
        self._scopes = tuple(Scope(f"layers.{number}") for number in range(world.series))
        self._tokens = self._rng.integers(16, 65, (world.prompts, 1)).astype(np.float64)
        self._level = MEAN * self._rng.lognormal(0, 0.5, (world.prompts, world.series))
        self._seed = seed
        self._num_runs = 0
        self._good = [self._measure(np.zeros(world.series)) for _ in range(max(world.window, 1))]
        self._baseline = _mean(self._good)
        sigma = np.sqrt((1 + 1 / len(self._good)) / self._tokens.sum())
        self._shift = np.zeros(world.series) if shift is None else shift * sigma
        self.watches = [Watch(effect * float(sigma)) for effect in world.effects]
        self.rises = self.falls = 0

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
            self._baseline = _mean(self._good)
        count = len(self.watches)
        return [any(fired for fired, _ in moves[place::count]) for place in range(count)]

    def _measure(self, shift: Matrix) -> Night:
        """Return the sums of a run: the noise of a prompt's mean falls with its tokens."""
        shape = self._level.shape
        if self._world.heavy:
            noise = self._rng.standard_t(5, shape) / np.sqrt(5 / 3)
        else:
            noise = self._rng.standard_normal(shape)
        self._num_runs += 1
        means = self._level + shift + noise / np.sqrt(self._tokens)
        n = np.broadcast_to(self._tokens, shape)
        run_id = f"{self._seed}-{self._num_runs}"
        return Night(run_id, PromptSums(self._scopes, n, n * means))

    def _judge(self, run: Night, confirmed: Night | None) -> list[tuple[bool, bool]]:
        """Return of every rule whether it fires in this run, and whether it wants it confirmed."""
        alone = None if confirmed is None else self._tests(run)
        tests = established(self._tests(run, confirmed), alone)
        if confirmed is None:
            self.rises += any(each.established > 0 for each in tests.values())
            self.falls += any(each.established < 0 for each in tests.values())
        told = self._outcomes(run, {key[1:]: each for key, each in tests.items()})
        ref = RunRef(run.run_id, None if confirmed is None else confirmed.run_id)
        return [watch.take(outcome, ref) for watch, outcome in zip(self.watches, told, strict=True)]

    def _tests(self, run: Night, pooled: Night | None = None) -> dict[Key, Comparison]:
        resampler = Resampler(self._baseline.run_id, run.run_id)
        now = run.sums
        if pooled is not None:
            now = PromptSums(now.scopes, now.n, (now.total + pooled.sums.total) / 2)
        found = compare(METRIC, now, self._baseline.sums, {}, resampler)
        return {(NAME, METRIC, each.scope): each for each in found}

    def _outcomes(
        self, run: Night, tests: dict[tuple[str, str], Comparison]
    ) -> tuple[RuleOutcome, ...]:
        before = _result(self._baseline.sums)
        baseline = Baseline(before.name, None, None, before.measurements, comparisons=tests)
        rules = [watch.rule for watch in self.watches]
        return outcomes(_result(run.sums), rules, noise_floor={}, baseline=baseline)


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


def _mean(nights: list[Night]) -> Night:
    """Return several nights as one, prompt by prompt their mean."""
    first = nights[0].sums
    total = np.mean([night.sums.total for night in nights], axis=0)
    return Night(
        ":".join(night.run_id for night in nights), PromptSums(first.scopes, first.n, total)
    )


def _result(sums: PromptSums) -> CandidateResult:
    means = (sums.total.sum(0) / sums.n.sum(0)).tolist()
    rows = (_row(scope, mean) for scope, mean in zip(sums.scopes, means, strict=True))
    return CandidateResult(NAME, None, None, tuple(rows))


def _row(scope: Scope, mean: float) -> Measurement:
    return Measurement(
        METRIC, scope, n=1, n_nan=0, n_posinf=0, n_neginf=0, n_missing=0, mean=mean, std=None,
        se=None, min=None, p50=None, p90=None, p95=None, p99=None, p999=None, max=None,
        max_prompt=None, max_position=None, method="all positions",
    )  # fmt: skip


def simulate(world: World, repeats: int, jobs: int = 1) -> dict[str, Any]:
    """Return the share of repeats that keep each promise, and how it came about."""
    with ProcessPoolExecutor(jobs) as pool:
        spread: Callable[..., Any] = pool.map if jobs > 1 else map
        seeds = range(repeats)
        nights = list(spread(partial(false_alerts, world), seeds))
        one = list(spread(partial(found, world, 1, 5.0), seeds))
        ten = list(spread(partial(found, world, 10, 3.0), seeds))
    counts = zip(*(fired for fired, _, _ in nights), strict=True)
    rules = zip(world.effects, counts, zip(*one, strict=True), zip(*ten, strict=True), strict=True)
    return {
        "world": asdict(world),
        "repeats": repeats,
        "rules": [_promises(*each) for each in rules],
        "nights_with_established_increases": sum(rises for _, rises, _ in nights),
        "nights_with_established_decreases": sum(falls for _, _, falls in nights),
    }


def _promises(
    effect: float, counts: Sequence[int], one: Sequence[bool], ten: Sequence[bool]
) -> dict[str, Any]:
    """Return how one rule did in all repeats."""
    repeats = len(counts)
    return {
        "min_effect_in_sigma": effect,
        "at_most_one_false_alert": sum(count <= 1 for count in counts) / repeats,
        "false_alerts_per_repeat": sum(counts) / repeats,
        "most_false_alerts": max(counts),
        "found_5_sigma_in_one_series": sum(one) / repeats,
        "found_3_sigma_in_ten_series": sum(ten) / repeats,
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
