"""A night judged on some of its prompts, with a planted fault and without it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from quantwatch.alerts.overrides import rules_for
from quantwatch.alerts.sighting import Seen
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Alert, CandidateResult, RunResult
from quantwatch.pipeline.against import Against, Blocks, Found
from quantwatch.pipeline.bench import Case, judged
from quantwatch.pipeline.judge import measured_candidate
from quantwatch.pipeline.measure import Measured
from quantwatch.pipeline.paired import measured_blocks
from quantwatch.pipeline.request import RunRequest

Rows = Sequence[int]
"""Prompts by their place among all of the night's."""
_OF_ALL_PROMPTS = ("router_load_tv", "router_load_max")
"""Metrics that are counted over the whole suite at once."""


@dataclass(frozen=True)
class Night:
    """A night that is measured and judged, and the baseline that it was judged by."""

    request: RunRequest
    measured: Measured
    result: RunResult
    compared_with: Against | None

    @property
    def name(self) -> str:
        """The first candidate that could be loaded, or else the first: its rules judge."""
        return next(iter(self.measured.models.candidates), self.request.check.candidates[0].name)

    @property
    def num_prompts(self) -> int:
        """Prompts of the whole night."""
        return len(self.measured.suite.prompts)

    @property
    def has_baseline(self) -> bool:
        """Whether a canary is compared with the baseline: a copy of the reference has none."""
        config = self.request.check.canary
        return config is not None and config.of == "candidate"

    @property
    def against(self) -> Against | None:
        """What the canary is compared with."""
        return self.compared_with if self.has_baseline else None

    @cached_property
    def rules(self) -> dict[str, RuleConfig]:
        """The rules that judge, by name."""
        (config,) = (c for c in self.request.check.candidates if c.name == self.name)
        targets = self.measured.suite.num_targets > 0
        found = rules_for(self.request.check, config, has_targets=targets)
        return {rule.name: rule for rule in found}


def seen_with_fault(night: Night, copied: Measured, rows: Rows) -> Seen:
    """Return the planted copy, judged by the noise floor and the baseline of the real night."""
    copied = replace(copied, floor=night.measured.floor)
    return _judged(night, measured_candidate(night.name, copied), measured_blocks(copied), rows)


def control_of(night: Night, rows: Rows) -> Seen:
    """Return the candidate as it was measured tonight, on the same prompts: no model runs."""
    every = sorted(prompt.index for prompt in night.measured.suite.prompts)
    part = replace(night.measured, sink=night.measured.sink.among([every[row] for row in rows]))
    return _judged(night, measured_candidate(night.name, part), measured_blocks(part), rows)


def counting(night: Night, rows: Rows) -> Callable[[Alert], bool]:
    """Return which breaches can be compared with those of the control.

    On some of the prompts a baseline is known by its prompt sums alone: rules on another statistic
    than the mean are left out, and all on a baseline whose sums are gone.
    """
    rules, against = night.rules, night.against
    whole = len(rows) == night.num_prompts

    def counts(alert: Alert) -> bool:
        rule = rules[alert.rule]
        if rule.source in _OF_ALL_PROMPTS and night.has_baseline:
            return False
        if rule.kind != "baseline" or whole:
            return True
        known = against is not None and against.blocks(night.name, rule.source) is not None
        return rule.statistic == "mean" and known

    return counts


def _judged(night: Night, result: CandidateResult, now: Blocks, rows: Rows) -> Seen:
    """Judge one candidate as a run's only one; nothing is looked up about the check's alerts."""
    check = night.request.check
    only = tuple(config for config in check.candidates if config.name == night.name)
    case = Case(
        run=replace(night.result, verdict=None, candidates=(), alerts=(), outcomes=()),
        check=check.model_copy(update={"candidates": only}),
        results={night.name: result},
        against=_cut(night.against, rows),
        now=now,
        has_targets=night.measured.suite.num_targets > 0,
    )
    done = judged(case, None)
    return Seen(done.candidates[0], done.alerts)


def _cut(against: Against | None, rows: Rows) -> Against | None:
    """Return a baseline with the prompt sums of some prompts."""
    if against is None:
        return None
    whole = against.blocks

    def blocks(candidate: str, metric: str) -> Found | None:
        found = whole(candidate, metric)
        return None if found is None else (found[0], [each[list(rows)] for each in found[1]])

    return replace(against, blocks=blocks)
