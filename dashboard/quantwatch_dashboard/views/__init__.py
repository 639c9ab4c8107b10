"""The pages. Each has an address of its own and query parameters that restore what it shows."""

from typing import Any

import streamlit as st

from quantwatch_dashboard.views import alerts, overview, run


def pages() -> list[Any]:
    """Return the pages in the order of the menu."""
    return [
        st.Page(overview.show, title="Overview", url_path="overview", default=True),
        st.Page(run.show, title="Run", url_path="run"),
        st.Page(alerts.show, title="Alerts", url_path="alerts"),
    ]
