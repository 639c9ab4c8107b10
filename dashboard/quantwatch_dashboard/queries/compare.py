"""Two runs held against each other: which there are, and the paired tests over their prompts."""

from collections.abc import Callable, Mapping, Sequence

import streamlit as st

from quantwatch.baselines.decision import established
from quantwatch.baselines.paired import Matrix, Resampler
from quantwatch.baselines.series import compare_candidate
from quantwatch.domain import Comparison, RunResult, Scope
from quantwatch.store import blocks
from quantwatch.store.records import RunSummary
from quantwatch_dashboard.logic.contrast import TESTED, family
from quantwatch_dashboard.queries import runs
from quantwatch_dashboard.queries.connection import LONG_S, database

Key = tuple[str, str]
"""Run and candidate."""
Floors = Mapping[tuple[str, str], float]
"""Noise floors by metric and scope."""
MOST_RUNS, MOST_OWN = 80, 60


def options(url: str, check: str | None = None) -> dict[str, RunSummary]:
    """Return the newest runs that measured something: of one check first, then of any."""
    own = runs.recent_runs(url, check, MOST_OWN) if check is not None else ()
    found = (*own, *runs.recent_runs(url, None, MOST_RUNS))
    return {run.run_id: run for run in found if run.verdict is not None}


def usual_other(url: str, result: RunResult) -> str:
    """Return what a run is usually held against: its baseline, the run before, itself."""
    known = runs.baseline(url, result.baseline_run_id)
    if known is not None:
        return known.run_id
    recent = runs.recent_runs(url, result.check, MOST_OWN)
    before = (r for r in recent if r.verdict is not None and r.started_at < result.started_at)
    found = next(before, None)
    return result.run_id if found is None else found.run_id


@st.cache_resource(ttl=LONG_S, max_entries=16, show_spinner=False)
def tests(url: str, a: Key, b: Key) -> Mapping[tuple[str, str], Comparison]:
    """Return the comparison of every metric and scope whose prompt sums both have, decided.

    Only for runs that are comparable: the same prompts, positions and definitions.
    """
    floors = [runs.result(url, run_id).noise_floor for run_id, _ in (a, b)]
    found = compare_candidate(
        TESTED, _evidence(url, b), _evidence(url, a), larger(*floors), Resampler(a[0], b[0])
    )
    decided = established(family(found))
    return found | {(metric, Scope(scope)): test for (_, metric, scope), test in decided.items()}


def larger(a: Floors, b: Floors) -> Floors:
    """Return the larger noise floor of both runs, for what either of them measured."""
    return {key: max(floor[key] for floor in (a, b) if key in floor) for key in {*a, *b}}


def _evidence(
    url: str, key: Key
) -> Callable[[str], tuple[tuple[Scope, ...], Sequence[Matrix]] | None]:
    def sums(metric: str) -> tuple[tuple[Scope, ...], Sequence[Matrix]] | None:
        block = blocks.get_block(database(url), *key, "per_prompt", metric)
        return None if block is None else (block.scopes, [block.values])

    return sums
