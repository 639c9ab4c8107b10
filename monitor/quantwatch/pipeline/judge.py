"""metrics → culprit → rules → verdict: from what was measured to what it means."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quantwatch.alerts.outcomes import outcomes, unmeasured
from quantwatch.alerts.overrides import rules_for
from quantwatch.alerts.rules import evaluate
from quantwatch.alerts.unmeasured import not_compared, not_measured
from quantwatch.alerts.verdicts import has_improved, run_verdict, verdict_of
from quantwatch.baselines.comparable import mismatches
from quantwatch.baselines.differences import differences
from quantwatch.baselines.drift import drift
from quantwatch.domain import (
    Alert,
    Baseline,
    CandidateResult,
    Culprit,
    NonFinite,
    RuleOutcome,
    RunResult,
    RunStatus,
    Variant,
    Verdict,
)
from quantwatch.metrics.culprit import find_culprit
from quantwatch.metrics.registry import VERSION
from quantwatch.pipeline.against import Against, confirmed, find_baseline
from quantwatch.pipeline.measure import REFERENCE, Measured
from quantwatch.pipeline.paired import Rules, Sides, Tests, measured_blocks, tests_of
from quantwatch.pipeline.request import RunRequest
from quantwatch.telemetry import environment

if TYPE_CHECKING:
    from quantwatch.store.session import Database


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

    def baseline_of(self, name: str) -> Baseline | None:
        """Return a candidate in the baseline with its paired tests, None when it has none."""
        found = None if self.against is None else self.against.run.find(name)
        if found is None:
            return None
        known = {field.name: getattr(found, field.name) for field in fields(CandidateResult)}
        return Baseline(**known, comparisons=self.tests.get(name, {}))

    def compared(self, name: str) -> RuleOutcome:
        """Return whether anything kept a candidate's rules from comparing with the baseline."""
        asked = any(rule.enabled and rule.kind == "baseline" for rule in self.rules[name])
        said = f"the baseline measured something else: {'; '.join(self.problems)}"
        return not_compared(name, said if asked and self.problems else None, self.patience)


def judge(
    request: RunRequest,
    measured: Measured,
    run_id: str,
    started: datetime,
    database: "Database | None",
) -> RunResult:
    """Return the run: a verdict per candidate, alerts, outcomes, the comparison with a baseline.

    The database holds the baseline; without one a run is compared with the file of the request, or
    with nothing. A baseline that measured something else is not compared: the verdicts are then
    inconclusive at best, and the run says which digests differ.
    """
    run = _unjudged(request, measured, run_id, started)
    against = find_baseline(request, database, run)
    problems = () if against is None else mismatches(run, against.run)
    if against is not None:
        run = replace(run, capture={**run.capture, "baseline": against.to_json()})
    results = {config.name: _measured(config.name, measured) for config in request.check.candidates}
    if against is not None:
        results = _with_drift(run, against.run, results)
    bench = _bench(request, measured, (run, against, problems), results, database)
    judged = [_judge_candidate(result, bench) for result in results.values()]
    candidates = tuple(result for result, _, _ in judged)
    return replace(
        run,
        verdict=run_verdict(candidates),
        finished_at=_now(database),
        candidates=candidates,
        alerts=tuple(alert for _, alerts, _ in judged for alert in alerts),
        outcomes=tuple(each for _, _, outcomes in judged for each in outcomes),
        baseline_run_id=None if against is None else against.run.run_id,
        baseline_mismatch=problems,
    )


def _now(database: "Database | None") -> datetime:
    """Return the time by the database's clock: the end of a run decides whether a check lives."""
    if database is None:
        return datetime.now(UTC)
    from quantwatch.store import clock

    with database.reader() as session:
        return clock.now(session)


def _bench(
    request: RunRequest,
    measured: Measured,
    compared: tuple[RunResult, Against | None, tuple[str, ...]],
    results: Mapping[str, CandidateResult],
    database: "Database | None",
) -> _Bench:
    run, against, problems = compared
    patience = request.check.alerting.unhealthy_runs
    has_targets = measured.suite.num_targets > 0
    rules = {
        config.name: rules_for(request.check, config, has_targets=has_targets)
        for config in request.check.candidates
    }
    if against is None or problems:
        return _Bench(run, None, rules, {}, problems, patience)
    known = {name: r for name, r in results.items() if r.measurements and against.run.find(name)}
    sides = Sides(run, measured_blocks(measured), against, confirmed(database, run))
    return _Bench(run, against, rules, tests_of(sides, known, rules), (), patience)


def _unjudged(request: RunRequest, measured: Measured, run_id: str, started: datetime) -> RunResult:
    suite, report = measured.suite, measured.report
    return RunResult(
        run_id=run_id,
        check=request.name,
        status=RunStatus.SUCCEEDED,
        verdict=None,
        started_at=started,
        finished_at=None,
        suite_name=suite.name,
        suite_hash=suite.hash,
        num_tokens=suite.num_tokens,
        num_prompts=len(suite.prompts),
        reference=measured.models.reference.variant,
        capture_sha=request.plan.sha,
        metrics_version=VERSION,
        environment=environment(),
        config=request.check.model_dump(mode="json"),
        noise_floor=dict(measured.floor),
        timings_s=dict(measured.timings_s),
        capture={
            **report.to_json(),
            "suite_notes": list(suite.notes),
            "noise_floor_by_source": {k: dict(v) for k, v in measured.floor_by_source.items()},
        },
    )


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
    judged = replace(result, verdict=verdict)
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


def _measured(name: str, measured: Measured) -> CandidateResult:
    """Return a candidate before it is judged; its verdict is known if the reference is broken."""
    failure = measured.models.failures.get(name)
    if failure is not None:
        return CandidateResult(name, None, None, failure=failure)
    result = _measured_candidate(name, measured)
    broken = measured.report.first_nonfinite.get(REFERENCE)
    return result if broken is None else _undecided(result, broken)


def _measured_candidate(name: str, measured: Measured) -> CandidateResult:
    report, measurements = measured.report, measured.sink.measurements(name)
    nonfinite = measured.sink.first_nonfinite(name)
    bit_equal = report.bit_equal[name]
    culprit = find_culprit(
        measurements,
        floor=measured.floor,
        first_nonfinite=nonfinite,
        bit_equal=bit_equal,
        head_rows=report.head_rows.get(name, ()),
    )
    variant = _with_notes(measured.models.candidates[name].variant, measured.models.notes[name])
    return CandidateResult(
        name, variant, None, measurements, culprit, nonfinite, bit_equal=bit_equal
    )


def _undecided(result: CandidateResult, broken: NonFinite) -> CandidateResult:
    """Whatever differs from NaN says nothing about the candidate."""
    place = f"{broken.scope}, prompt {broken.prompt}, position {broken.position}"
    words = f"The reference itself is not finite, first at {place}: nothing can be told from it."
    culprit = Culprit(None, None, None, words)
    return replace(result, verdict=Verdict.INCONCLUSIVE, culprit=culprit)


def _with_notes(variant: Variant, notes: tuple[str, ...]) -> Variant:
    return replace(variant, notes=(*variant.notes, *notes))
