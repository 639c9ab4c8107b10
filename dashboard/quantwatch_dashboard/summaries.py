"""What pages say about runs and tokens, computed from records. Pure: no clock, no database."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from quantwatch.config.default_rules import DEFAULT_RULES
from quantwatch.domain import Json, RunStatus
from quantwatch.store.records import RunSummary
from quantwatch.store.states import CheckState, Headline, UnendedRun
from quantwatch_dashboard.charts.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.charts.sparkline import Trend

_DECIDING = "baseline-kl"
"""The rule that judges the headline against the baseline."""
_NOISE_FLOORS = 3
_KINDS = {"nan": math.nan, "posinf": math.inf, "neginf": -math.inf}


@dataclass(frozen=True, slots=True)
class Band:
    """What the headline is compared with: a change within it is no regression."""

    baseline: float
    low: float
    high: float


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
    trends: tuple[Trend, ...]
    bands: tuple[Band | None, ...]
    now: tuple[float | None, ...]
    num_runs: int
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
        num_runs=len(state.recent),
        tags=tuple(state.config.get("tags", ())),
        state=state,
    )


def _candidate_names(state: CheckState) -> tuple[str, ...]:
    """Return the newest run's candidates in its order, so that colors agree with the run page."""
    run = state.decided or state.newest
    if run is not None and run.candidates:
        return tuple(name for name, _ in run.candidates)
    return tuple(candidate["name"] for candidate in state.config.get("candidates", ()))


def _trend(index: int, name: str, runs: Sequence[Mapping[str, Headline]]) -> Trend:
    found = [run.get(name) for run in runs]
    return Trend(index, [None if h is None else _KINDS.get(h.kind, h.value) for h in found])


def _band(state: CheckState, candidate: str) -> Band | None:
    """Return what the rule on the headline allows: its least effect, or three noise floors.

    None also where the two runs did not measure the same in the same way.
    """
    known = state.baseline.get(candidate)
    if known is None or known.value is None or state.differs:
        return None
    floors = [run.floor for run in state.recent if run.floor is not None]
    half = max(_least_effect(state.config, candidate), _NOISE_FLOORS * (floors or [0.0])[-1])
    return Band(known.value, max(0.0, known.value - half), known.value + half)


def _least_effect(config: Json, candidate: str) -> float:
    """Return `min_effect` of the rule: as the candidate has it, the check, or by default."""
    own = [c.get("rules", ()) for c in config.get("candidates", ()) if c["name"] == candidate]
    for rules in (*own, config.get("rules", ())):
        for rule in rules:
            if rule["name"] == _DECIDING and rule.get("min_effect") is not None:
                return float(rule["min_effect"])
    default = next(rule for rule in DEFAULT_RULES if rule.name == _DECIDING)
    return default.min_effect or 0.0


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
