"""Operations: how the receivers do, what waits for them, and letting one be enabled."""

from functools import partial

import streamlit as st

from quantwatch.store.applied import REMOVED
from quantwatch_dashboard import actions, clock
from quantwatch_dashboard.components import asking, leftovers, page, service, upkeep
from quantwatch_dashboard.components.markup import link, tag
from quantwatch_dashboard.queries import operations as operation_queries
from quantwatch_dashboard.roles import Role


def show(url: str) -> None:
    """Show the endpoints, those that are disabled with a way back, and the outbox."""
    found, now, zone = operation_queries.service(url), clock.now(), clock.zone()
    page.section("Endpoints", "In a row: failures since the last success. Lately: a moving mean.")
    endpoints = operation_queries.receivers(url)
    if endpoints:
        st.html(upkeep.receivers(endpoints, now, zone))
    else:
        st.html(upkeep.nothing("No endpoint was ever configured: nobody is told of an alert."))
    disabled = [one.name for one in endpoints if one.state not in ("enabled", REMOVED)]
    leftovers.show("endpoints", [f"enable-{name}" for name in disabled])
    for name in disabled:
        _enable(name)
    page.section("Outbox", _oldest(found))
    if found.deliveries:
        with st.columns([1, 1])[0]:
            st.html(upkeep.counts(found.deliveries))
        log = link("the page Alerts", "alerts")
        st.html(tag("p", "Each message, and dead letters to tell again: ", log, class_="qw-soft"))
    else:
        st.html(upkeep.nothing("It is empty: nothing was ever told."))


def _oldest(found: operation_queries.Service) -> str:
    if found.oldest_delivery is None:
        return "Nothing waits to be told."
    at = found.oldest_delivery.astimezone(clock.zone())
    return f"The oldest message that is still to be told is of {at:%Y-%m-%d %H:%M:%S %Z}."


def _enable(name: str) -> None:
    words, button = st.columns([7, 1.3], vertical_alignment="center")
    with words:
        st.html(service.row(name, "is disabled: nothing is sent to it"))
    with button:
        asking.button(
            "Enable",
            partial(actions.enable_endpoint, name=name),
            key=f"enable-{name}",
            needs=Role.ADMIN,
            ask=f"What waits for {name} is sent to it at once.",
            done="It is enabled.",
        )
