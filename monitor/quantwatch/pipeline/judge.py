"""metrics → culprit → rules → verdict: from what was measured to what it means."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from quantwatch.alerts.overrides import rules_for
from quantwatch.alerts.rules import evaluate
from quantwatch.alerts.verdicts import has_improved, run_verdict, verdict_of
from quantwatch.baselines.comparable import mismatches
from quantwatch.baselines.differences import changes, differences
from quantwatch.config.schema import CandidateConfig
from quantwatch.domain import (
    Alert,
    CandidateResult,
    Culprit,
    NonFinite,
    RunResult,
    RunStatus,
    Variant,
    Verdict,
)
from quantwatch.metrics.culprit import find_culprit
from quantwatch.metrics.registry import VERSION
from quantwatch.pipeline.measure import REFERENCE, Measured
from quantwatch.pipeline.request import RunRequest
from quantwatch.telemetry import environment


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every candidate of a run is judged against."""

    run: RunResult
    baseline: RunResult | None
    comparable: bool


def judge(
    request: RunRequest,
    measured: Measured,
    run_id: str,
    started: datetime,
    baseline: RunResult | None,
) -> RunResult:
    """Return the run: a verdict per candidate, alerts, and the comparison with a baseline.

    A baseline that measured something else is not compared: the verdicts are then inconclusive at
    best, and the run says which digests differ.
    """
    run = _unjudged(request, measured, run_id, started)
    problems = () if baseline is None else mismatches(run, baseline)
    bench = _Bench(run, None if problems else baseline, not problems)
    results: list[CandidateResult] = []
    alerts: list[Alert] = []
    for config in request.check.candidates:
        result, found = _judge_candidate(request, measured, config, bench)
        results.append(result)
        alerts.extend(found)
    return replace(
        run,
        verdict=run_verdict(results),
        finished_at=datetime.now(UTC),
        candidates=tuple(results),
        alerts=tuple(alerts),
        baseline_run_id=None if baseline is None else baseline.run_id,
        baseline_mismatch=problems,
    )


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
        capture={**report.to_json(), "suite_notes": list(suite.notes)},
    )


def _judge_candidate(
    request: RunRequest, measured: Measured, config: CandidateConfig, bench: _Bench
) -> tuple[CandidateResult, tuple[Alert, ...]]:
    name, models = config.name, measured.models
    if name in models.failures:
        return CandidateResult(name, None, None, failure=models.failures[name]), ()
    result = _measured_candidate(name, measured)
    if (broken := measured.report.first_nonfinite.get(REFERENCE)) is not None:
        return _undecided(result, broken), ()
    rules = rules_for(request.check, config, has_targets=measured.suite.num_targets > 0)
    floor = bench.run.noise_floor
    before = None if bench.baseline is None else bench.baseline.find(name)
    alerts = evaluate(result, rules, noise_floor=floor, baseline=before)
    improved = has_improved(result, before, rules, noise_floor=floor)
    verdict = verdict_of(alerts, improved=improved, comparable=bench.comparable)
    judged = replace(result, verdict=verdict)
    if before is None or bench.baseline is None:
        return judged, alerts
    known = replace(bench.run, candidates=(judged,))
    told = (*changes(known, bench.baseline, name), *differences(judged, before, floor))
    return replace(judged, baseline_differences=told), alerts


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
