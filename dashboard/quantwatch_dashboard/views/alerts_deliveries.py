"""Deliveries: how each endpoint stands, what was lost, and what was sent."""

import streamlit as st

from quantwatch.store.dead_letters import STATES
from quantwatch.store.endpoints import EndpointState
from quantwatch_dashboard import actions, clock
from quantwatch_dashboard.components import asking, filters, page, trouble
from quantwatch_dashboard.components.alerts_endpoints import WORDS, delivery_table, endpoint_table
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.roles import Role
from quantwatch_dashboard.views import alerts_letters

_ANY = "any"


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
        chosen = filters.choose("Endpoint", "endpoint", [_ANY, *names], width=220)
        states = [_ANY, *STATES]
        state = filters.choose("State of deliveries", "delivery", states, _word, 220)
    endpoint = None if chosen == _ANY else chosen
    if endpoint is not None:
        _enable(next(known for known, _ in found if known.name == endpoint))
    alerts_letters.show(url, endpoint)
    page.section("Newest deliveries", f"At most {alert_queries.MOST_DELIVERIES}, newest first.")
    shown = alert_queries.deliveries(url, None if state == _ANY else state, endpoint)
    if shown:
        st.html(delivery_table(shown, clock.now(), clock.zone()))
    else:
        st.html(tag("p", "None.", class_="qw-soft"))


def _enable(endpoint: EndpointState) -> None:
    key = f"enable-{endpoint.name}"
    if endpoint.state in ("enabled", "removed"):
        asking.show_said(key)
        return
    asking.button(
        "Enable this endpoint",
        lambda who: actions.enable_endpoint(who, endpoint.name),
        key=key,
        needs=Role.ADMIN,
        ask="It is sent what comes from now on; its dead letters stay until they are replayed.",
        done="Enabled. Its dead letters can be told again below.",
    )


def _word(state: str) -> str:
    return WORDS.get(state, state)
