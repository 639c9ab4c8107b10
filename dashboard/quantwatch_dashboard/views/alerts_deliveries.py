"""Deliveries: how each endpoint stands, what was lost, and what was sent."""

import streamlit as st

from quantwatch.store.dead_letters import STATES
from quantwatch_dashboard import clock
from quantwatch_dashboard.components import address, answers, page, trouble
from quantwatch_dashboard.components.address import every, given
from quantwatch_dashboard.components.alerts_endpoints import delivery_table, endpoint_table
from quantwatch_dashboard.logic import delivery_words
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.text import ANY
from quantwatch_dashboard.views import acts, alerts_dead_letters


def show(url: str) -> None:
    """Show endpoints, dead letters and the newest deliveries."""
    found = alert_queries.receivers(url)
    if not found:
        words = "No endpoint is configured: nobody is notified. docs/webhooks.md shows how."
        st.html(trouble.state("Nobody to notify", words))
        return
    page.section("Endpoints", "Those in trouble first. A disabled one is sent nothing.")
    st.html(endpoint_table(found, clock.now(), clock.zone()))
    endpoint, state = _filters([one.name for one, _ in found])
    off = [
        s.name for s, _ in found if endpoint == s.name and delivery_words.can_be_enabled(s.state)
    ]
    answers.show("endpoints", [acts.enable_key(name) for name in off])
    for name in off:
        acts.enable(name)
    alerts_dead_letters.show(url, endpoint, sum(
        load.num_dead for state, load in found if endpoint in (None, state.name)
    ))  # fmt: skip
    page.section("Newest deliveries", f"At most {alert_queries.MOST_DELIVERIES}, newest first.")
    shown = alert_queries.deliveries(url, state, endpoint)
    if shown:
        st.html(delivery_table(shown, clock.now(), clock.zone()))
    else:
        page.say("There is no such delivery.")


def _filters(names: list[str]) -> tuple[str | None, str | None]:
    """Let the reader choose an endpoint, and a state of deliveries; None for all."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        endpoint = address.choose("Endpoint", "endpoint", [ANY, *names], every("endpoints"), 220)
        called = every("states", _word)
        state = address.choose("State of deliveries", "delivery", [ANY, *STATES], called, 220)
    return given(endpoint), given(state)


def _word(state: str) -> str:
    return delivery_words.delivery(state).word
