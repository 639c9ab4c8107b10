"""Runs: which there are, and one with all its measurements."""

from collections.abc import Mapping

import streamlit as st

from quantwatch.domain import Alert, RunResult
from quantwatch.errors import UserError
from quantwatch.store import attempts as store_attempts
from quantwatch.store import overview, reading, runs
from quantwatch.store.attempts import Attempt
from quantwatch.store.records import RunSummary
from quantwatch.store.states import UnendedRun
from quantwatch_dashboard.queries.connection import LONG_S, SHORT_S, database


@st.cache_resource(ttl=SHORT_S, max_entries=64, show_spinner=False)
def recent_runs(url: str, check: str | None = None, limit: int = 25) -> tuple[RunSummary, ...]:
    """Return the newest runs, of one check or of all; slots that were skipped are none."""
    return tuple(runs.list_runs(database(url), check=check, limit=limit, skipped=False))


@st.cache_resource(ttl=SHORT_S, max_entries=64, show_spinner=False)
def resolve(url: str, named: str) -> str:
    """Return the id of the run that was named. Raises UserError when there is none."""
    return runs.resolve_run_id(database(url), named)


def result(url: str, run_id: str) -> RunResult:
    """Return a run with all its measurements. Raises UserError when there is none."""
    found = _result(url, run_id)
    if not found.status.is_ended:
        _result.clear(url, run_id)
    return found


@st.cache_resource(ttl=LONG_S, max_entries=32, show_spinner=False)
def _result(url: str, run_id: str) -> RunResult:
    """A run that has ended does not change; of one that has not only the header is read."""
    return runs.get_result(database(url), run_id)


@st.cache_resource(ttl=LONG_S, max_entries=8, show_spinner=False)
def alerts_of(url: str, run_ids: tuple[str, ...]) -> Mapping[str, tuple[Alert, ...]]:
    """Return what ended runs breached, by id, and nothing else of them."""
    with database(url).reader() as session:
        found = reading.read_alerts(session, run_ids)
    return {run: tuple(alerts) for run, alerts in found.items()}


@st.cache_resource(ttl=SHORT_S, max_entries=32, show_spinner=False)
def attempts(url: str, run_id: str) -> tuple[Attempt, ...]:
    """Return every try of a run by a worker, the first one first."""
    return tuple(store_attempts.list_attempts(database(url), run_id))


def progress(url: str, check: str, run_id: str) -> UnendedRun | None:
    """Return how far a run is, None when it has ended. Never cached: a live panel asks."""
    found = overview.unended_runs(database(url), check)
    return next((run for run in found if run.run_id == run_id), None)


@st.cache_resource(ttl=SHORT_S * 3, max_entries=16, show_spinner=False)
def baseline(url: str, run_id: str | None) -> RunResult | None:
    """Return the run that another one is compared with, None when it isn't in the database."""
    if run_id is None:
        return None
    try:
        return result(url, run_id)
    except UserError:  # from a file, or dropped by retention
        return None
