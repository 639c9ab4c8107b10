"""How small a change would have been found, and planted faults that show whether it is."""

import streamlit as st

from quantwatch.domain import Detectable
from quantwatch.store import canaries
from quantwatch.store.canaries import Flown
from quantwatch.store.detectables import detectables_of
from quantwatch_dashboard.queries.connection import LONG_S, SHORT_S, database

MOST = 30
"""Canaries of a check that are shown: a month of nights."""


@st.cache_resource(ttl=LONG_S, max_entries=64, show_spinner=False)
def of_run(url: str, run_id: str) -> tuple[tuple[str, tuple[Detectable, ...]], ...]:
    """Return candidate and what its rules could have found, of each of which that is known."""
    return tuple(detectables_of(database(url), run_id))


@st.cache_resource(ttl=SHORT_S, max_entries=64, show_spinner=False)
def of_check(url: str, check: str) -> tuple[Flown, ...]:
    """Return a check's newest canaries, newest first."""
    return tuple(canaries.canaries_of(database(url), check, MOST))


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def newest(url: str) -> tuple[Flown, ...]:
    """Return every check's newest canary."""
    return tuple(canaries.newest_canaries(database(url)))
