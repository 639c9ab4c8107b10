"""What pages say about runs and tokens, computed from records. Pure: no clock, no database."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from quantwatch.domain import RunStatus, Verdict
from quantwatch.store.records import RunSummary, SeriesPoint
from quantwatch_dashboard.charts.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.charts.sparkline import Trend

_ENDED_BADLY = (RunStatus.FAILED, RunStatus.CANCELLED)
_KINDS = {"nan": math.nan, "posinf": math.inf, "neginf": -math.inf}


@dataclass(frozen=True, slots=True)
class CheckSummary:
    """One check on the overview.

    `decided` is its newest succeeded run and `since` when the verdict became what it is; `trouble`
    is the newest run if that one failed or was cancelled: not a regression.
    """

    check: str
    newest: RunSummary
    decided: RunSummary | None
    since: datetime | None
    trouble: RunSummary | None
    candidates: tuple[str, ...]
    trends: tuple[Trend, ...]
    num_runs: int

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: worst verdict first, then those in trouble, then by name."""
        verdict = self.decided.verdict if self.decided is not None else None
        rank = list(Verdict).index(verdict) if verdict is not None else 1.5
        return int(rank * 2), self.trouble is None, self.check


def summarize(
    check: str, recent: Sequence[RunSummary], series: Sequence[SeriesPoint], *, max_runs: int
) -> CheckSummary:
    """Describe a check by its recent runs (newest first) and its output KL per run.

    Raises ValueError without a run.
    """
    if not recent:
        raise ValueError(f"check {check} has no run to be summarized")
    succeeded = [run for run in recent if run.status == RunStatus.SUCCEEDED]
    decided = succeeded[0] if succeeded else None
    shown = [run.run_id for run in reversed(recent[:max_runs])]
    names = _candidate_names(decided or recent[0], series)
    return CheckSummary(
        check=check,
        newest=recent[0],
        decided=decided,
        since=_since(succeeded),
        trouble=recent[0] if recent[0].status in _ENDED_BADLY else None,
        candidates=names,
        trends=_trends(names, shown, series),
        num_runs=len(recent),
    )


def _since(succeeded: Sequence[RunSummary]) -> datetime | None:
    """Return when the newest verdict was reached first without another one since."""
    since = None
    for run in succeeded:
        if run.verdict != succeeded[0].verdict:
            break
        since = run.started_at
    return since


def _candidate_names(run: RunSummary, series: Sequence[SeriesPoint]) -> tuple[str, ...]:
    """Return the run's candidates in its order, so that colors agree with the run page."""
    return tuple(name for name, _ in run.candidates) or tuple(sorted({p.candidate for p in series}))


def _trends(
    names: Sequence[str], shown: Sequence[str], series: Sequence[SeriesPoint]
) -> tuple[Trend, ...]:
    values = {(p.run_id, p.candidate): _KINDS.get(p.kind, p.value) for p in series}
    return tuple(
        Trend(index, [values.get((run_id, name)) for run_id in shown])
        for index, name in enumerate(names)
    )


@dataclass(frozen=True, slots=True)
class WorstToken:
    """One token and a value at it."""

    place: TokenPlace
    value: float


def worst(grids: Iterable[TokenGrid], count: int) -> tuple[WorstToken, ...]:
    """Return the places with the largest values of the first row of each grid; NaN leads."""
    found = [
        WorstToken(grid.places[j], float(grid.values[0, j]))
        for grid in grids
        for j in np.flatnonzero(~grid.missing[0])
    ]
    return tuple(sorted(found, key=_badness)[:count])


def _badness(token: WorstToken) -> tuple[float, int, int]:
    value = math.inf if math.isnan(token.value) else token.value
    return -value, token.place.prompt, token.place.position
