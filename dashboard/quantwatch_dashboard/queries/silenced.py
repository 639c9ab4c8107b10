"""Which of the alerts that fire are told to nobody for now."""

from collections import Counter
from collections.abc import Mapping

import streamlit as st

from quantwatch.alerts.silences import matches
from quantwatch.store.silences import active_silences, firing_labels
from quantwatch_dashboard.queries.connection import SHORT_S, database


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def silenced(given: str) -> Mapping[str, int]:
    """Return how many firing alerts of each check are silenced now."""
    with database(given).reader() as session:
        silences = active_silences(session)
        alerts = firing_labels(session) if silences else []
    return Counter(
        labels["check"]
        for labels in alerts
        if any(matches(silence.matcher, labels) for silence in silences)
    )
