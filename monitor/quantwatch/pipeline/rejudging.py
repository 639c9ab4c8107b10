"""A stored run judged under the rules of today. What it measured stays as it is, and so does it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quantwatch.alerts.verdicts import HEADLINES
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import CandidateResult, RunResult, RunStatus, Verdict
from quantwatch.errors import UserError
from quantwatch.pipeline.against import choose_baseline, stored
from quantwatch.pipeline.bench import Case, judged
from quantwatch.pipeline.measure import REFERENCE

if TYPE_CHECKING:
    from quantwatch.store.session import Database


def rejudge(database: "Database", run: RunResult, today: CheckConfig) -> RunResult:
    """Return a succeeded run as today's rules and today's baseline would have it judged.

    What decides how it was measured is the run's own. Raises UserError when there is nothing left
    to judge: another end than success, or statistics that retention has deleted.
    """
    _require_judgeable(run)
    check = rules_of_today(run, today)
    bare = _as_measured(run)
    results = {config.name: bare.find(config.name) for config in check.candidates}
    case = Case(
        run=bare,
        check=check,
        results={name: result for name, result in results.items() if result is not None},
        against=choose_baseline(database, bare, check),
        now=stored(database, (run.run_id,)),
        has_targets=_has_targets(bare),
    )
    return judged(case, database)


def rules_of_today(run: RunResult, today: CheckConfig) -> CheckConfig:
    """Return a run's own check with the rules, baseline and alerting of today.

    Candidates that the check no longer has are left out.
    """
    own = CheckConfig.model_validate(run.config)
    rules = {candidate.name: candidate.rules for candidate in today.candidates}
    candidates = tuple(
        candidate.model_copy(update={"rules": rules[candidate.name]})
        for candidate in own.candidates
        if candidate.name in rules
    )
    if not candidates:
        raise UserError(
            f"run {run.run_id} measured {', '.join(c.name for c in own.candidates)}; "
            f"check {run.check} has none of these candidates any more"
        )
    now = {name: getattr(today, name) for name in ("rules", "baseline", "alerting", "schedule")}
    return own.model_copy(update={**now, "candidates": candidates})


def lost_sums(database: "Database", judged_run: RunResult, check: CheckConfig) -> Iterator[str]:
    """Yield the candidates whose prompt sums are gone, so that nothing could be paired."""
    blocks = stored(database, (judged_run.run_id,))
    for config in check.candidates:
        result = judged_run.find(config.name)
        if result is None or not result.measurements:
            continue
        if all(blocks(config.name, metric) is None for metric in HEADLINES):
            yield config.name


def _require_judgeable(run: RunResult) -> None:
    if run.status is not RunStatus.SUCCEEDED:
        raise UserError(f"run {run.run_id} is {run.status}; only a succeeded run is judged")
    gone = [one.name for one in run.candidates if one.failure is None and not one.measurements]
    if gone:
        raise UserError(
            f"run {run.run_id} has no statistics of {', '.join(gone)} any more "
            "(retention.statistics); nothing can be judged"
        )


def _as_measured(run: RunResult) -> RunResult:
    """Return a run as it was before it was judged."""
    broken = REFERENCE in (run.capture.get("first_nonfinite") or {})
    capture = {key: value for key, value in run.capture.items() if key != "baseline"}
    return replace(
        run,
        verdict=None,
        alerts=(),
        outcomes=(),
        baseline_run_id=None,
        baseline_mismatch=(),
        capture=capture,
        candidates=tuple(_candidate(one, broken=broken) for one in run.candidates),
    )


def _candidate(result: CandidateResult, *, broken: bool) -> CandidateResult:
    """Of a broken reference the verdict is known before any rule is asked."""
    undecided = Verdict.INCONCLUSIVE if broken and result.failure is None else None
    return replace(result, verdict=undecided, baseline_differences=())


def _has_targets(run: RunResult) -> bool:
    """Say whether the prompts had next tokens: whether a metric of these was measured."""
    found = (one.find("nll_difference") for one in run.candidates)
    return any(row is not None and row.n > 0 for row in found)
