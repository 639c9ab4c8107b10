"""Operations: how the receivers do, what waits for them, and letting one be enabled."""

import streamlit as st

from quantwatch_dashboard import clock, text
from quantwatch_dashboard.components import answers, page, service
from quantwatch_dashboard.components.alerts_endpoints import counts, endpoint_table
from quantwatch_dashboard.components.markup import join, link
from quantwatch_dashboard.logic import delivery_words
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.queries import operations as operation_queries
from quantwatch_dashboard.views import acts


def show(url: str) -> None:
    """Show the endpoints, those that are disabled with a way back, and the outbox."""
    found, now, zone = operation_queries.service(url), clock.now(), clock.zone()
    page.section("Endpoints", "Those in trouble first. A disabled one is sent nothing.")
    endpoints = alert_queries.receivers(url)
    if endpoints:
        st.html(endpoint_table(endpoints, now, zone))
    else:
        page.say("No endpoint was ever configured: nobody is notified of an alert.")
    disabled = [one.name for one, _ in endpoints if delivery_words.can_be_enabled(one.state)]
    answers.show("endpoints", [acts.enable_key(name) for name in disabled])
    for name in disabled:
        with service.beside(service.row(name, "is disabled: nothing is sent to it")):
            acts.enable(name)
    page.section("Outbox", _oldest(found))
    if found.deliveries:
        with st.columns([1, 1])[0]:
            st.html(counts(found.deliveries))
        log = link("the page Alerts", "alerts")
        page.say(join(["Each delivery, and dead letters to replay: ", log, "."]))
    else:
        page.say("It is empty: nothing was ever sent.")


def _oldest(found: operation_queries.Service) -> str:
    if found.oldest_delivery is None:
        return "No delivery is waiting."
    at = text.instant(found.oldest_delivery, clock.zone())
    return f"The oldest delivery that is open is of {at}."
