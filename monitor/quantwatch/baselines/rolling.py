"""Several runs as one: what a rolling baseline says where no prompts are paired."""

from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import fmean

from quantwatch.domain import CandidateResult, Measurement, RunResult

_AVERAGED = ("mean", "std", "se", "min", "p50", "p90", "p95", "p99", "p999", "max")


def averaged(runs: Sequence[RunResult]) -> RunResult:
    """Return the first run with every statistic a mean over the runs that have it finite.

    Identity, environment, counts and places stay those of the first run, the newest one.
    """
    newest = runs[0]
    candidates = (_candidate(each, runs) for each in newest.candidates)
    return replace(newest, candidates=tuple(candidates))


def _candidate(newest: CandidateResult, runs: Sequence[RunResult]) -> CandidateResult:
    found = [found for run in runs if (found := run.find(newest.name)) is not None]
    rows = [{(m.metric, m.scope): m for m in each.measurements} for each in found]
    measurements = (
        _row(m, [known[m.metric, m.scope] for known in rows if (m.metric, m.scope) in known])
        for m in newest.measurements
    )
    return replace(newest, measurements=tuple(measurements))


def _row(newest: Measurement, rows: Sequence[Measurement]) -> Measurement:
    clean = [row for row in rows if not row.num_nonfinite]
    if newest.num_nonfinite or len(clean) < 2:
        return newest
    values = {name: [getattr(row, name) for row in clean] for name in _AVERAGED}
    known = {name: fmean(found) for name, found in values.items() if None not in found}
    assert known.keys() <= {field.name for field in fields(newest)}
    return replace(newest, **known)  # type: ignore[arg-type]
