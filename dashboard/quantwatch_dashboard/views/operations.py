"""Operations: does the service run, what waits, and is there room for what comes."""

import streamlit as st

from quantwatch_dashboard import clock
from quantwatch_dashboard.components import address, page, service, trouble
from quantwatch_dashboard.logic import service_words
from quantwatch_dashboard.logic.service_words import Figure
from quantwatch_dashboard.queries import connection, overview
from quantwatch_dashboard.queries import operations as operation_queries
from quantwatch_dashboard.views import (
    operations_audit,
    operations_database,
    operations_delivery,
    operations_gpus,
    operations_service,
    operations_settings,
)

_EVERY_S = 5
_PARTS = {
    "service": ("Service", operations_service.show),
    "delivery": ("Delivery", operations_delivery.show),
    "database": ("Database", operations_database.show),
    "gpus": ("GPUs", operations_gpus.show),
    "settings": ("Settings", operations_settings.show),
    "audit": ("Audit", operations_audit.show),
}


@trouble.guarded
def show() -> None:
    """Show the figures at the top and, below, the part that the address names."""
    page.begin()
    url = connection.url()
    # Before any fragment: when the database is the trouble there is one card, not two.
    operation_queries.service(url)
    _top(url)
    shown = address.tabs({name: title for name, (title, _) in _PARTS.items()})
    _PARTS[shown][1](url)


@st.fragment(run_every=_EVERY_S)
@trouble.guarded
def _top(url: str) -> None:
    """Show headline and figures, and ask again every few seconds."""
    found = operation_queries.service(url)
    figures = _figures(url, found)
    page.head(service_words.headline(found.parts, found.leader, found.silence_s, figures))
    st.html(service.tiles(figures))


def _figures(url: str, found: operation_queries.Service) -> tuple[Figure, ...]:
    space, now = operation_queries.space(url), clock.now()
    failed = operation_queries.num_failed(url)
    return (
        service_words.scheduler(found.leader, found.silence_s),
        service_words.workers(found.parts),
        service_words.queue(overview.running(url), now),
        service_words.deliveries(dict(found.deliveries), found.oldest_delivery, now),
        service_words.trouble(failed, len(found.quarantined), found.parts),
        service_words.room(space.total_bytes, space.disk),
    )
