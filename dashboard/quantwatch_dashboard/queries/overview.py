"""The overview: one summary per check, and where those with a regression broke."""

from collections.abc import Mapping, Sequence

import streamlit as st

from quantwatch.domain import RunResult, Verdict
from quantwatch.store.overview import check_states, unended_runs
from quantwatch.store.reading import read_results
from quantwatch.store.recent import HEADLINE
from quantwatch.store.states import UnendedRun
from quantwatch_dashboard.logic import series
from quantwatch_dashboard.logic.summaries import CheckSummary, summarize
from quantwatch_dashboard.queries.connection import SHORT_S, database

LIVE_S = 1
"""How long progress is kept: many readers of a running check ask once a second, not each."""
_MAX_FAULTS = 10


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def checks(url: str) -> tuple[CheckSummary, ...]:
    """Return one summary per check that is in use or has runs, worst first.

    Their trends are of the newest run only: `with_trends` reads those of the rows that are shown.
    """
    states = check_states(database(url), history=False)
    shown = (state for state in states if state.in_use or state.newest is not None)
    return tuple(sorted(map(summarize, shown), key=lambda summary: summary.order))


def with_trends(url: str, shown: Sequence[CheckSummary]) -> tuple[CheckSummary, ...]:
    """Return the same checks with their newest runs."""
    found = with_history(url, tuple(check.check for check in shown))
    return tuple(found.get(check.check, check) for check in shown)


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def with_history(url: str, names: tuple[str, ...]) -> Mapping[str, CheckSummary]:
    """Return these checks with their newest runs, by name."""
    states = check_states(database(url), names)
    return {state.check: summarize(state) for state in states}


@st.cache_resource(ttl=LIVE_S, max_entries=4, show_spinner=False)
def running(url: str) -> tuple[UnendedRun, ...]:
    """Return the runs that wait or are under way, with their progress, oldest first."""
    return unended_runs(database(url))


def faults(url: str, shown: Sequence[CheckSummary] | None = None) -> dict[str, str]:
    """Return, of checks with a regression, the candidate and where it broke: of those shown, or of
    the first ten.
    """
    broken = [c.decided for c in (checks(url) if shown is None else shown) if c.decided]
    worst = [run.run_id for run in broken if run.verdict == Verdict.REGRESSION]
    return _faults(url, tuple(worst[:_MAX_FAULTS] if shown is None else worst))


@st.cache_resource(ttl=SHORT_S * 3, max_entries=32, show_spinner=False)
def _faults(url: str, runs: tuple[str, ...]) -> dict[str, str]:
    # Who leads and where it broke is kept with the candidates: no need for every measurement.
    with database(url).reader() as session:
        found = read_results(session, runs, metric=HEADLINE)
    return {run.check: fault_of(run) for run in found.values()}


def fault_of(found: RunResult) -> str:
    """Return the candidate that matters and where it broke, "" without candidates."""
    lead = series.leading(found)
    return f"{lead.name}: {series.fault(found, lead)}" if lead is not None else ""
