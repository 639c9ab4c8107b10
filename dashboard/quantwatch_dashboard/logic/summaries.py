"""What pages say about runs and tokens, computed from records. Pure: no clock, no database."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from quantwatch.domain import RunStatus
from quantwatch.store.kinds import from_kind
from quantwatch.store.records import RunSummary
from quantwatch.store.states import CheckState, Headline, UnendedRun
from quantwatch_dashboard.logic.bands import Band, headline_band
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.logic.lines import Sparkline


@dataclass(frozen=True, slots=True)
class CheckSummary:
    """One check on the overview.

    `decided` is its newest succeeded run and `since` when the verdict became what it is; `trouble`
    is the newest ended run if that one has no results: the monitor's trouble, not a regression. One
    that a person cancelled is neither, unless there is no other.
    `bands` and `now` belong to `candidates`: None where nothing is compared, and where the decided
    run did not measure the headline.
    """

    check: str
    newest: RunSummary | None
    decided: RunSummary | None
    since: datetime | None
    trouble: RunSummary | None
    candidates: tuple[str, ...]
    trends: tuple[Sparkline, ...]
    bands: tuple[Band | None, ...]
    now: tuple[float | None, ...]
    tags: tuple[str, ...]
    state: CheckState

    @property
    def unfinished(self) -> RunSummary | None:
        """The run in trouble, else the newest one if a person cancelled it: told, not counted."""
        newest = self.newest
        cancelled = newest is not None and newest.status is RunStatus.CANCELLED
        return self.trouble or (newest if cancelled else None)

    @property
    def order(self) -> tuple[bool, int, bool, str]:
        """Sort key: worst verdict first, then those in trouble, then by name.

        Checks that are no longer configured come last, however they stood when they were.
        """
        verdict = self.decided.verdict if self.decided is not None else None
        place = 3 if verdict is None else 2 * verdict.rank
        return not self.state.in_use, place, self.trouble is None, self.check

    @property
    def last_success(self) -> datetime | None:
        """When the newest succeeded run ended; when it began where its end was not kept."""
        run = self.decided
        ended = None if run is None else run.finished_at or run.started_at
        return self.state.last_success_at or ended

    @property
    def is_rolling(self) -> bool:
        """Whether verdicts compare with a mean of several runs, of which one is known here."""
        return (self.state.config.get("baseline") or {}).get("kind") == "rolling"

    @property
    def compared_with(self) -> str:
        """Name what bands belong to, so that no number is taken for the verdict's own."""
        return "the newest run of its baseline's window" if self.is_rolling else "its baseline"

    @property
    def is_baseline(self) -> bool:
        """Whether the decided run is what it would be compared with: that says nothing of it."""
        decided = self.decided
        return decided is not None and decided.run_id == self.state.baseline_run_id

    @property
    def not_comparable(self) -> str:
        """Say why nothing is compared with the baseline run, "" where it can be."""
        differs = ", ".join(self.state.differs)
        return f"not comparable with its baseline (different {differs})" if differs else ""

    @property
    def under_way(self) -> UnendedRun | None:
        """The run that a worker holds, None when nobody measures this check."""
        return next((run for run in self.state.unended if run.status.is_active), None)

    @property
    def num_waiting(self) -> int:
        """Runs that wait for a worker."""
        return sum(run.status is RunStatus.QUEUED for run in self.state.unended)


def summarize(state: CheckState) -> CheckSummary:
    """Describe a check as it stands: its newest runs as trends, oldest first."""
    # A cancelled run is no trouble, unless nothing else is known of the check.
    latest, decided = state.latest or state.newest, state.decided
    names = _candidate_names(state)
    failed = latest is not None and latest.status is not RunStatus.SUCCEEDED
    headlines = [{each.candidate: each for each in run.headlines} for run in state.recent]
    trends = tuple(_trend(i, name, headlines) for i, name in enumerate(names))
    at = next(
        (i for i, r in enumerate(state.recent) if decided and r.run_id == decided.run_id), None
    )
    return CheckSummary(
        check=state.check,
        newest=state.newest,
        decided=decided,
        since=state.since,
        trouble=latest if failed else None,
        candidates=names,
        trends=trends,
        bands=tuple(_band(state, name) for name in names),
        now=tuple(None if at is None else trend.values[at] for trend in trends),
        tags=tuple(state.config.get("tags", ())),
        state=state,
    )


def _candidate_names(state: CheckState) -> tuple[str, ...]:
    """Return the newest run's candidates in its order, so that colors agree with the run page."""
    run = state.decided or state.newest
    if run is not None and run.candidates:
        return tuple(name for name, _ in run.candidates)
    return tuple(candidate["name"] for candidate in state.config.get("candidates", ()))


def _trend(index: int, name: str, runs: Sequence[Mapping[str, Headline]]) -> Sparkline:
    found = [run.get(name) for run in runs]
    return Sparkline(index, [None if h is None else from_kind(h.value, h.kind) for h in found])


def _band(state: CheckState, candidate: str) -> Band | None:
    """Return what the headline is compared with; None where the two runs can't be compared."""
    known = state.baseline.get(candidate)
    if known is None or state.differs:
        return None
    return headline_band(known.value, [r.floor for r in state.recent], state.config, candidate)


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
