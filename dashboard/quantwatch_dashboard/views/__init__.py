"""The pages. Each has an address of its own and query parameters that restore what it shows."""

from typing import Any

import streamlit as st

from quantwatch_dashboard.views import alerts, check, compare, kernels, operations, overview, run


def pages() -> list[Any]:
    """Return the pages in the order of the menu."""
    return [
        st.Page(overview.show, title="Overview", url_path="overview", default=True),
        st.Page(check.show, title="Check", url_path="check"),
        st.Page(run.show, title="Run", url_path="run"),
        st.Page(compare.show, title="Compare", url_path="compare"),
        st.Page(alerts.show, title="Alerts", url_path="alerts"),
        st.Page(kernels.show, title="Kernels", url_path="kernels"),
        st.Page(operations.show, title="Operations", url_path="operations"),
    ]
