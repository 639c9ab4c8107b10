"""What was measured, judged: every candidate by its rules, and against its baseline.

Whether it was measured a minute ago or is read from the store makes no difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from quantwatch.alerts.outcomes import outcomes, unmeasured
from quantwatch.alerts.overrides import rules_for
from quantwatch.alerts.rules import evaluate
from quantwatch.alerts.unmeasured import not_compared, not_measured
from quantwatch.alerts.verdicts import has_improved, run_verdict, verdict_of
from quantwatch.baselines.comparable import mismatches
from quantwatch.baselines.decision import CONFIRMED
from quantwatch.baselines.differences import differences
from quantwatch.baselines.discovery import FALSE_DISCOVERIES
from quantwatch.baselines.drift import drift
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import Alert, Baseline, CandidateResult, RuleOutcome, RunResult
from quantwatch.pipeline.against import Against, Blocks, confirmed
from quantwatch.pipeline.detectable import Family, detectable
from quantwatch.pipeline.paired import Rules, Sides, Tests, is_pooled, tests_of
from quantwatch.pipeline.since_good import reopened

if TYPE_CHECKING:
    from quantwatch.store.session import Database


@dataclass(frozen=True, slots=True)
class Case:
    """A run whose candidates are measured and not judged yet, and what it is judged by."""

    run: RunResult
    check: CheckConfig
    results: Mapping[str, CandidateResult]
    """By name; a verdict is known only where the reference is broken."""
    against: Against | None
    now: Blocks
    """The prompt sums of this run."""
    has_targets: bool
    """Whether its prompts have next tokens."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every candidate of a run is judged against."""

    run: RunResult
    against: Against | None
    rules: Rules
    tests: Mapping[str, Tests]
    problems: tuple[str, ...]
    """In what the baseline differs, so that nothing is compared."""
    patience: int
    """Runs in a row without a measurement before somebody is told."""
    sides: Sides | None = None
    rate: float = FALSE_DISCOVERIES
    """Of false discoveries, at which differences are established."""

    def baseline_of(self, name: str) -> Baseline | None:
        """Return a candidate in the baseline with its paired tests, None when it has none."""
        found = None if self.against is None else self.against.run.find(name)
        if found is None:
            return None
        known = {field.name: getattr(found, field.name) for field in fields(CandidateResult)}
        return Baseline(**known, comparisons=self.tests.get(name, {}))

    @property
    def family(self) -> Family:
        """Among how many comparisons, and how strictly, this run decides what is established."""
        judged = sum(each.q is not None for tests in self.tests.values() for each in tests.values())
        return Family(judged, self.rate)

    def compared(self, name: str) -> RuleOutcome:
        """Return whether anything kept a candidate's rules from comparing with the baseline."""
        asked = any(rule.enabled and rule.kind == "baseline" for rule in self.rules[name])
        said = f"the baseline measured something else: {'; '.join(self.problems)}"
        return not_compared(name, said if asked and self.problems else None, self.patience)


def judged(case: Case, database: "Database | None") -> RunResult:
    """Return the run: a verdict per candidate, alerts, outcomes, the comparison with a baseline.

    A baseline that measured something else is not compared: the verdicts are then inconclusive at
    best, and the run says which digests differ.
    """
    run, against = case.run, case.against
    measured = replace(run, candidates=tuple(case.results.values()))
    problems = () if against is None else mismatches(measured, against.run)
    if against is not None:
        run = replace(run, capture={**run.capture, "baseline": against.to_json()})
        case = replace(case, results=_with_drift(run, against.run, case.results))
    bench = _bench(case, run, problems, database)
    judged_ones = [_judge_candidate(result, bench) for result in case.results.values()]
    candidates = tuple(result for result, _, _ in judged_ones)
    done = replace(
        run,
        verdict=run_verdict(candidates),
        candidates=candidates,
        alerts=tuple(alert for _, alerts, _ in judged_ones for alert in alerts),
        outcomes=tuple(each for _, _, outcomes in judged_ones for each in outcomes),
        baseline_run_id=None if against is None else against.run.run_id,
        baseline_mismatch=problems,
    )
    if database is None or bench.sides is None:
        return done
    return reopened(database, done, bench.sides, bench.rules)


def _bench(
    case: Case, run: RunResult, problems: tuple[str, ...], database: "Database | None"
) -> _Bench:
    check, against, results = case.check, case.against, case.results
    patience = check.alerting.unhealthy_runs
    rules = {
        config.name: rules_for(check, config, has_targets=case.has_targets)
        for config in check.candidates
    }
    if against is None or problems:
        return _Bench(run, None, rules, {}, problems, patience)
    known = {name: r for name, r in results.items() if r.measurements and against.run.find(name)}
    sides = Sides(run, case.now, against, confirmed(database, run))
    tests = tests_of(sides, known, rules)
    confirms = any(is_pooled(sides, result) for result in known.values())
    rate = CONFIRMED if confirms else FALSE_DISCOVERIES
    return _Bench(run, against, rules, tests, (), patience, sides, rate)


def _judge_candidate(
    result: CandidateResult, bench: _Bench
) -> tuple[CandidateResult, tuple[Alert, ...], tuple[RuleOutcome, ...]]:
    rules, floor = bench.rules[result.name], bench.run.noise_floor
    why = _why_unmeasured(result)
    seen = not_measured(result.name, why, bench.patience)
    if why is not None:
        return result, (), (seen, *unmeasured(result, rules, why))
    before = bench.baseline_of(result.name)
    alerts = evaluate(result, rules, noise_floor=floor, baseline=before)
    judged_rules = outcomes(result, rules, noise_floor=floor, baseline=before)
    told = (seen, bench.compared(result.name), *judged_rules)
    improved = has_improved(result, before, rules, noise_floor=floor)
    verdict = verdict_of(alerts, improved=improved, comparable=not bench.problems)
    could = detectable(result, rules, floor, before, bench.family)
    judged = replace(result, verdict=verdict, detectable=could)
    if before is None or bench.against is None:
        return judged, alerts, told
    told_apart = (*judged.baseline_differences, *differences(judged, before, floor))
    return replace(judged, baseline_differences=told_apart), alerts, told


def _why_unmeasured(result: CandidateResult) -> str | None:
    """Return why there is nothing to judge: the candidate failed, or the reference is broken."""
    if result.failure is not None:
        return f"could not be measured: {result.failure}"
    if result.verdict is None:
        return None
    return "nothing can be told" if result.culprit is None else result.culprit.words


def _with_drift(
    run: RunResult, baseline: RunResult, results: Mapping[str, CandidateResult]
) -> dict[str, CandidateResult]:
    """Add what else changed since the baseline, comparable or not: rules and messages use it."""
    known = replace(run, candidates=tuple(results.values()))
    return {
        name: replace(result, baseline_differences=drift(known, baseline, name))
        for name, result in results.items()
    }
