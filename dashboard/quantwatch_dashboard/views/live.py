"""What is under way, asked for again every few seconds, without drawing the page anew."""

import streamlit as st

from quantwatch_dashboard import clock, queries
from quantwatch_dashboard.components import live, trouble
from quantwatch_dashboard.queries.forgetting import forget

_EVERY_S = 3


def show(url: str, check: str | None = None) -> None:
    """Show the runs under way, of one check or of all. When one begins or ends, all is redrawn."""
    _live(url, check, frozenset(run.run_id for run in queries.running(url)))


@st.fragment(run_every=_EVERY_S)
@trouble.guarded
def _live(url: str, check: str | None, known: frozenset[str]) -> None:
    found = queries.running(url)
    if {run.run_id for run in found} != known:
        forget()
        st.rerun()
    st.html(live.cards([run for run in found if check in (None, run.check)], clock.now()))
