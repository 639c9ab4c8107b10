"""One check: how it stands, its runs on a time axis, any statistic over them."""

import streamlit as st

from quantwatch.errors import NotFoundError
from quantwatch.store import summaries
from quantwatch.store.marks import RunMark, run_marks
from quantwatch.store.overview import check_states
from quantwatch.store.reading import read_results
from quantwatch.store.records import SeriesPoint
from quantwatch_dashboard.logic.history import Change, Tradeoff, changes, tradeoffs
from quantwatch_dashboard.logic.naming import Statistic
from quantwatch_dashboard.logic.summaries import CheckSummary, summarize
from quantwatch_dashboard.queries.connection import LONG_S, SHORT_S, database
from quantwatch_dashboard.queries.overview import fault_of

MOST_RUNS = 400
"""Runs of a trend: a year of nights and some."""
ALL_RUNS = 4_000
"""What is read when somebody asks for all of them: eleven years of nights."""
HEADLINE = Statistic("logit_kl", "model", "mean")


@st.cache_resource(ttl=SHORT_S, max_entries=64, show_spinner=False)
def summary(url: str, check: str) -> CheckSummary:
    """Return how a check stands. Raises UserError when there is none of that name."""
    found = check_states(database(url), check)
    if not found:
        raise NotFoundError(f"There is no check {check!r} in this database.")
    return summarize(found[0])


@st.cache_resource(ttl=SHORT_S, max_entries=64, show_spinner=False)
def trend(
    url: str, check: str, shown: Statistic = HEADLINE, limit: int = MOST_RUNS
) -> tuple[SeriesPoint, ...]:
    """Return one statistic of all candidates over the newest succeeded runs, oldest first.

    Raises UserError on an unknown statistic.
    """
    return tuple(summaries.get_series(database(url), check, *shown, limit=limit))


@st.cache_resource(ttl=LONG_S, max_entries=256, show_spinner=False)
def points_of(url: str, run_id: str, shown: Statistic = HEADLINE) -> tuple[SeriesPoint, ...]:
    """Return one statistic of all candidates of one run, however old, () without results."""
    return tuple(summaries.points_of(database(url), run_id, *shown))


@st.cache_resource(ttl=SHORT_S, max_entries=64, show_spinner=False)
def marks(url: str, check: str, limit: int = MOST_RUNS) -> tuple[RunMark, ...]:
    """Return the newest ended runs with what they were made with, oldest first."""
    return run_marks(database(url), check, limit)


@st.cache_resource(ttl=SHORT_S, max_entries=64, show_spinner=False)
def changed(url: str, check: str, limit: int = MOST_RUNS) -> tuple[Change, ...]:
    """Return what changed from run to run: driver, libraries, weights, reference, …"""
    return changes(marks(url, check, limit))


@st.cache_resource(ttl=LONG_S, max_entries=64, show_spinner=False)
def fault(url: str, run_id: str) -> str:
    """Return which candidate of a run matters and where it broke, "" without results."""
    with database(url).reader() as session:
        found = read_results(session, [run_id], metric=HEADLINE[0])
    return "".join(fault_of(run) for run in found.values())


@st.cache_resource(ttl=LONG_S, max_entries=64, show_spinner=False)
def places(url: str, run_id: str) -> tuple[tuple[str, str], ...]:
    """Return the (metric, scope) that a run measured: what a trend can be shown of."""
    return tuple(summaries.measured_places(database(url), run_id))


def pareto(url: str, check: str, shown: Statistic = HEADLINE) -> tuple[Tradeoff, ...]:
    """Return size and quality of the newest succeeded run's candidates, () without one."""
    run = summary(url, check).decided
    found = [mark for mark in marks(url, check) if run is not None and mark.run_id == run.run_id]
    points = trend(url, check, shown)
    return tradeoffs(found[-1], points) if found else ()
