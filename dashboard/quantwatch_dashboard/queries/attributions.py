"""Attributions of a run: written by `quantwatch attribute`, whenever somebody calls it."""

import streamlit as st

from quantwatch.domain import Attribution
from quantwatch.store.attributions import attributions_of
from quantwatch_dashboard.queries.connection import SHORT_S, database


@st.cache_resource(ttl=SHORT_S, max_entries=16, show_spinner=False)
def of_run(url: str, run_id: str) -> tuple[Attribution, ...]:
    """Return what was attributed of a run, in the order of its candidates."""
    return tuple(attributions_of(database(url), run_id))
