"""Alerts: what fires, since when, who knows, and what a team does about it."""

import streamlit as st

from quantwatch.errors import NotFoundError
from quantwatch_dashboard.components import address, page, trouble
from quantwatch_dashboard.logic.episodes import headline
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.queries import connection, overview
from quantwatch_dashboard.views import (
    alerts_deliveries,
    alerts_list,
    alerts_one,
    alerts_silences,
)

_TABS = {"alerts": "Alerts", "silences": "Silences", "deliveries": "Deliveries"}


@trouble.guarded
def show() -> None:
    """Show one episode if the address names one; else a list: alerts, silences or deliveries."""
    page.begin()
    url = connection.url()
    if not overview.checks(url):
        page.head("Alerts")
        st.html(trouble.empty())
        return
    named = _named(url)
    if named is not None:
        alerts_one.show(url, named)
        return
    found = alert_queries.open_episodes(url)
    page.head("Alerts", headline(found))
    _not_understood(url)
    tab = address.tabs(_TABS)
    if tab == "silences":
        alerts_silences.show(url)
    elif tab == "deliveries":
        alerts_deliveries.show(url)
    else:
        alerts_list.show(url, found)


def _not_understood(url: str) -> None:
    """Say of which checks maintenance and flapping aren't known, where that is so."""
    if names := alert_queries.not_understood(url):
        words = (
            f"Settings of {', '.join(names)} were applied by another version of quantwatch and "
            "can't be read: whether alerts are in maintenance or come and go is not known there. "
            "The service applies them anew when it starts with this version."
        )
        page.note(words)


def _named(url: str) -> str | None:
    """Return the episode that the address asks for: itself, or the newest of an alert."""
    episode, alert = st.query_params.get("episode"), st.query_params.get("alert")
    if episode or not alert:
        return episode or None
    # Digits beyond any number of a database would not fit into its column.
    number = int(alert) if alert.isascii() and alert.isdecimal() and len(alert) < 10 else None
    found = () if number is None else alert_queries.episodes_of(url, number)
    if not found:
        raise NotFoundError(f"There is no episode of an alert {alert!r}.")
    return found[0].episode.id
