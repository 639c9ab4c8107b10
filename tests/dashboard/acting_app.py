"""The real app.py before one page: the number of an alert in the address, and a button for it."""

import runpy

import streamlit as st

from quantwatch_dashboard import actions, launch, views
from quantwatch_dashboard.components import asking, page
from quantwatch_dashboard.components.markup import tag


def show() -> None:
    """Show whether somebody may acknowledge, and let them."""
    page.begin()
    st.html(tag("h1", "Acting"))
    asking.worded(
        "Acknowledge",
        lambda who, words: actions.acknowledge(who, int(st.query_params.get("alert", "1")), words),
        key="ack",
        wants="What is being done",
        done="Acknowledged.",
    )


views.pages = lambda: [st.Page(show, title="Acting", url_path="acting", default=True)]
runpy.run_path(str(launch.app_path()))
