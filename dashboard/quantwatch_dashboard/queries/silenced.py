"""Which of the alerts that fire are told to nobody for now."""

from collections import Counter
from collections.abc import Mapping

import streamlit as st

from quantwatch.alerts.silences import matches
from quantwatch.store.episodes import open_alerts
from quantwatch.store.silences import active_silences
from quantwatch_dashboard.queries.connection import SHORT_S, database

_FIRING = ("firing", "recovering")


@st.cache_resource(ttl=SHORT_S, max_entries=4, show_spinner=False)
def silenced(given: str) -> Mapping[str, int]:
    """Return how many firing alerts of each check are silenced now."""
    with database(given).reader() as session:
        silences = active_silences(session)
        alerts = open_alerts(session) if silences else []
    return Counter(
        alert.check
        for alert in alerts
        if alert.state in _FIRING
        and any(matches(silence.matcher, alert.labels) for silence in silences)
    )
