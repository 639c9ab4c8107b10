"""metrics → culprit → rules → verdict: from what was measured to what it means."""

from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quantwatch.alerts.overrides import out_of_reach
from quantwatch.capture.events import chunk_words, products_words, unrouted_words
from quantwatch.domain import (
    BY_POSITION,
    WARNING,
    CandidateResult,
    Culprit,
    NonFinite,
    RunResult,
    RunStatus,
    Variant,
    Verdict,
)
from quantwatch.metrics.culprit import find_culprit, unseen_culprit
from quantwatch.metrics.registry import VERSION
from quantwatch.models.served.opening import NOT_MEASURABLE
from quantwatch.pipeline.against import Against, find_baseline
from quantwatch.pipeline.bench import Case, judged
from quantwatch.pipeline.measure import REFERENCE, Measured
from quantwatch.pipeline.paired import measured_blocks
from quantwatch.pipeline.request import RunRequest
from quantwatch.telemetry import environment

if TYPE_CHECKING:
    from quantwatch.store.session import Database


def judge(
    request: RunRequest,
    measured: Measured,
    run_id: str,
    started: datetime,
    database: "Database | None",
) -> RunResult:
    """Return the run: a verdict per candidate, alerts, outcomes, the comparison with a baseline."""
    return judge_against(request, measured, run_id, started, database)[0]


def judge_against(
    request: RunRequest,
    measured: Measured,
    run_id: str,
    started: datetime,
    database: "Database | None",
) -> tuple[RunResult, Against | None]:
    """Return the judged run, and what it was compared with: another may be pinned meanwhile.

    The database holds the baseline; without one a run is compared with the file of the request, or
    with nothing. A baseline that measured something else is not compared: the verdicts are then
    inconclusive at best, and the run says which digests differ.
    """
    run = _unjudged(request, measured, run_id, started)
    against = find_baseline(request, database, run)
    results = {
        config.name: _measured(config.name, measured, out_of_reach(request.check, config))
        for config in request.check.candidates
    }
    case = Case(
        run=run,
        check=request.check,
        results=results,
        against=against,
        now=measured_blocks(measured),
        has_targets=measured.suite.num_targets > 0,
    )
    return replace(judged(case, database), finished_at=_now(database)), against


def _now(database: "Database | None") -> datetime:
    """Return the time by the database's clock: the end of a run decides whether a check lives."""
    if database is None:
        return datetime.now(UTC)
    from quantwatch.store import clock

    with database.reader() as session:
        return clock.now(session)


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
        reference=_reference(measured),
        capture_sha=request.plan.over(suite).sha,
        metrics_version=VERSION,
        environment=environment(),
        config=request.check.model_dump(mode="json"),
        noise_floor=dict(measured.floor),
        timings_s=dict(measured.timings_s),
        capture={
            **report.to_json(),
            BY_POSITION: {
                name: [asdict(each) for each in measured.sink.by_position(name)]
                for name in measured.models.candidates
            },
            "suite_notes": list(suite.notes),
            "noise_floor_by_source": {k: dict(v) for k, v in measured.floor_by_source.items()},
        },
    )


def _reference(measured: Measured) -> Variant:
    """Return the reference, with what was wrong with its recording."""
    found = measured.report.reference_cache.get("warnings", ())
    notes = tuple(f"{WARNING}{words}" for words in found)
    return _with_notes(measured.models.reference.variant, notes)


def _measured(name: str, measured: Measured, unjudged: tuple[str, ...]) -> CandidateResult:
    """Return a candidate before it is judged; its verdict is known if the reference is broken."""
    failure = measured.models.failures.get(name) or measured.report.failed.get(name)
    if failure is not None:
        return CandidateResult(name, None, None, failure=failure)
    result = measured_candidate(name, measured, unjudged)
    broken = measured.report.first_nonfinite.get(REFERENCE)
    return result if broken is None else _undecided(result, broken)


def measured_candidate(
    name: str, measured: Measured, unjudged: tuple[str, ...] = ()
) -> CandidateResult:
    """Return a candidate that could be measured, with its culprit, before anything is judged.

    `unjudged` are names of rules that can't reach it.
    """
    report, measurements = measured.report, measured.sink.measurements(name)
    nonfinite = measured.sink.first_nonfinite(name)
    bit_equal = report.bit_equal.get(name, False)  # of a server nobody can tell
    if name in measured.models.served:
        culprit = unseen_culprit(NOT_MEASURABLE, nonfinite)
    else:
        culprit = find_culprit(
            measurements,
            floor=measured.floor,
            first_nonfinite=nonfinite,
            bit_equal=bit_equal,
            head_rows=report.head_rows.get(name, ()),
        )
    events = tuple(f"{WARNING}{words}" for words in report.events.get(name, ()))
    rules = [f"rules without effect ({NOT_MEASURABLE}): {', '.join(unjudged)}"] if unjudged else []
    chunked = chunk_words(report.chunked_prompts, estimated=report.has_estimates)
    local = name not in measured.models.served
    rounded = products_words(report.lens_products) if local else ()
    told = (*chunked, *rounded, *unrouted_words(report.unrouted, name), *rules)
    notes = (*measured.models.notes[name], *events, *told)
    variant = _with_notes(measured.models.variant(name), notes)
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
