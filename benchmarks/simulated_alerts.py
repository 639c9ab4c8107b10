"""Simulated runs, and a rule with its alert: the service's own rule and state machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from quantwatch.alerts.episodes import AlertState, Effect, Policy, Reason, RunRef, close, step
from quantwatch.alerts.outcomes import outcomes
from quantwatch.alerts.reopening import good_runs, to_closed, weigh_reopening
from quantwatch.alerts.rules import evaluate
from quantwatch.baselines.paired import PromptSums
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import (
    Alert,
    Baseline,
    CandidateResult,
    Comparison,
    Ended,
    Judged,
    Measurement,
    RuleOutcome,
    Scope,
)

METRIC = "rel_error"
NAME = "candidate"
_NEGLIGIBLE = 1e-12
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
Since = Callable[[Sequence[str]], dict[Scope, Comparison]]
"""Ids of earlier runs → what has changed since their mean."""


@dataclass(frozen=True, slots=True)
class Night:
    """A run, and the sums it measured."""

    run_id: str
    sums: PromptSums


class Watch:
    """A rule, its alert, and what became of both. `by_hand`: closed whenever it has fired."""

    def __init__(self, min_effect: float, *, by_hand: bool) -> None:
        self.rule = RuleConfig(
            name="baseline", metric=METRIC, scope="layers.*", kind="baseline",
            min_effect=max(min_effect, _NEGLIGIBLE),
        )  # fmt: skip
        self.state = AlertState()
        self._by_hand = by_hand
        self._now = _EPOCH
        self._fired_at = _EPOCH
        self._opened_at = _EPOCH
        self._judged: list[Judged] = []
        self._ended: list[tuple[str, Ended]] = []
        self._against = ""

    def take(
        self, result: CandidateResult, against: tuple[str, Baseline], run: RunRef, since: Since
    ) -> tuple[bool, bool]:
        """Return whether the alert fires in a run, and whether it asks for a confirmation."""
        self._against, baseline = against
        (outcome,) = outcomes(result, [self.rule], noise_floor={}, baseline=baseline)
        alerts: Sequence[Alert] = ()
        if outcome.outcome == "breach":
            alerts = evaluate(result, [self.rule], noise_floor={}, baseline=baseline)
            outcome, alerts = self._weighed(outcome, alerts, run, since)
        self._now += timedelta(hours=1)
        scopes = frozenset(alert.scope for alert in alerts if alert.is_decided)
        confirms = run.confirms is not None
        self._judged.append(Judged(run.run_id, outcome.outcome, self._now, confirms, scopes))
        was_told = self.state.state.is_told
        moved = step(self.state, outcome if was_told else to_closed(outcome), run, Policy())
        self.state = moved.state
        if Effect.OPENED in moved.effects:
            self._opened_at = self._now
        if Effect.RESOLVED in moved.effects:
            self._end(by_hand=False)
        fired = Effect.FIRED in moved.effects
        if fired:
            self._fired_at = self._now
        if fired and self._by_hand:
            self.close()
        return fired, Effect.CONFIRM in moved.effects

    def close(self) -> None:
        """Close the alert by hand, if somebody was told of it."""
        if self.state.state.is_told:
            self.state = close(self.state, Reason.MANUAL).state
            self._end(by_hand=True)

    def _end(self, *, by_hand: bool) -> None:
        ended = Ended(self._opened_at, self._fired_at, self._now, by_hand)
        self._ended.insert(0, (self._against, ended))

    def _weighed(
        self, outcome: RuleOutcome, alerts: Sequence[Alert], run: RunRef, since: Since
    ) -> tuple[RuleOutcome, Sequence[Alert]]:
        known = [each for each in self._judged if each.run_id != run.confirms]
        ended = [each for baseline, each in self._ended if baseline == self._against]
        good = good_runs(ended, known, outcome.leave_runs)
        good = {alert.scope: good[alert.scope] for alert in alerts if alert.scope in good}
        found: dict[Scope, Comparison] = {}
        for runs in dict.fromkeys(good.values()):
            found |= {s: test for s, test in since(runs).items() if good.get(s) == runs}
        return weigh_reopening(self.rule, outcome, alerts, found) if found else (outcome, alerts)


def mean_of(nights: list[Night]) -> Night:
    """Return several nights as one, prompt by prompt their mean."""
    first = nights[0].sums
    total = np.mean([night.sums.total for night in nights], axis=0)
    return Night(
        ":".join(night.run_id for night in nights), PromptSums(first.scopes, first.n, total)
    )


def pooled_with(run: Night, earlier: Night | None) -> PromptSums:
    """Return the sums of a run, as a mean with those of the run that it confirms."""
    if earlier is None:
        return run.sums
    total = (run.sums.total + earlier.sums.total) / 2
    return PromptSums(run.sums.scopes, run.sums.n, total)


def result_of(sums: PromptSums) -> CandidateResult:
    """Return a candidate with the mean at every scope."""
    means = (sums.total.sum(0) / sums.n.sum(0)).tolist()
    rows = (_row(scope, mean) for scope, mean in zip(sums.scopes, means, strict=True))
    return CandidateResult(NAME, None, None, tuple(rows))


def _row(scope: Scope, mean: float) -> Measurement:
    return Measurement(
        METRIC, scope, n=1, n_nan=0, n_posinf=0, n_neginf=0, n_missing=0, mean=mean, std=None,
        se=None, min=None, p50=None, p90=None, p95=None, p99=None, p999=None, max=None,
        max_prompt=None, max_position=None, method="all positions",
    )  # fmt: skip
