"""Deliveries: how each endpoint stands, what was lost, and what was sent."""

from collections.abc import Callable

import streamlit as st

from quantwatch.store.dead_letters import STATES
from quantwatch.store.endpoints import EndpointState
from quantwatch_dashboard import clock, delivery_words
from quantwatch_dashboard.components import asking, filters, page, trouble
from quantwatch_dashboard.components.alerts_endpoints import delivery_table, endpoint_table
from quantwatch_dashboard.components.filters import ANY
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.views import acts, alerts_letters


def show(url: str) -> None:
    """Show endpoints, dead letters and the newest deliveries."""
    found = alert_queries.receivers(url)
    if not found:
        words = (
            "No endpoint is configured: nobody is told of any alert. docs/webhooks.md shows how."
        )
        st.html(trouble.state("Nobody to tell", words))
        return
    page.section("Endpoints", "Those in trouble first. A disabled one is sent nothing.")
    st.html(endpoint_table(found, clock.now(), clock.zone()))
    names = [state.name for state, _ in found]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = filters.choose("Endpoint", "endpoint", [ANY, *names], _all("endpoints"), 220)
        states = [ANY, *STATES]
        state = filters.choose("State of deliveries", "delivery", states, _word, 220)
    endpoint = None if chosen == ANY else chosen
    if endpoint is not None:
        _enable(next(known for known, _ in found if known.name == endpoint))
    alerts_letters.show(url, endpoint, sum(
        load.num_dead for state, load in found if endpoint in (None, state.name)
    ))  # fmt: skip
    page.section("Newest deliveries", f"At most {alert_queries.MOST_DELIVERIES}, newest first.")
    shown = alert_queries.deliveries(url, None if state == ANY else state, endpoint)
    if shown:
        st.html(delivery_table(shown, clock.now(), clock.zone()))
    else:
        st.html(tag("p", "None.", class_="qw-soft"))


def _enable(endpoint: EndpointState) -> None:
    if delivery_words.can_be_enabled(endpoint.state):
        acts.enable(endpoint.name)
    else:
        asking.show_said(acts.enable_key(endpoint.name))


def _all(what: str) -> Callable[[str], str]:
    return lambda name: f"all {what}" if name == ANY else name


def _word(state: str) -> str:
    return "any" if state == ANY else delivery_words.delivery(state).word
