"""A run that is under way, live; and one that ended without results, with every attempt."""

import streamlit as st

from quantwatch.domain import RunResult
from quantwatch_dashboard import clock
from quantwatch_dashboard.components import page, run_attempts, trouble
from quantwatch_dashboard.queries import runs
from quantwatch_dashboard.queries.forgetting import forget_standings

_EVERY_S = 3


def show(url: str, result: RunResult) -> None:
    """Show what is known of a run without results; nothing of one that has some."""
    if not result.status.is_ended:
        _live(url, result)
    tries = runs.attempts(url, result.run_id)
    if tries and (result.verdict is None or len(tries) > 1):
        page.section(
            "Attempts",
            "Each try of a worker. What one ended with is the monitor's own trouble: it says"
            " nothing about a model.",
        )
        st.html(run_attempts.table_of(tries, clock.now(), clock.zone()))


@st.fragment(run_every=_EVERY_S)
@trouble.guarded
def _live(url: str, result: RunResult) -> None:
    """Ask every few seconds how far the run is; once it has ended the whole page is drawn anew."""
    found = runs.progress(url, result.check, result.run_id)
    if found is None:
        # Not all that is cached: other pages read other runs.
        forget_standings(frozenset({result.run_id}), frozenset())
        runs.attempts.clear()
        st.rerun()
    else:
        st.html(run_attempts.card(found, clock.now(), clock.zone()))
