"""Operations: how large the database is, and how fast it grows."""

import streamlit as st

from quantwatch_dashboard import clock, text
from quantwatch_dashboard.components import facts, page, storage
from quantwatch_dashboard.queries import connection
from quantwatch_dashboard.queries import operations as operation_queries

_SMALL_BYTES = 256 << 20
"""Up to this size a database is measured without asking: it takes less than a second."""


def show(url: str) -> None:
    """Show size, disk and schema at once; sizes by table when they are asked for."""
    space = operation_queries.space(url)
    disk = "not told by the server"
    if space.disk is not None:
        disk = f"{text.size(space.disk.free)} of {text.size(space.disk.total)} free"
    page.section("Database", "Sizes count indexes; free pages are used again before it grows.")
    st.html(
        facts.facts(
            [
                ("database", connection.shown_url(url)),
                ("size", text.size(space.total_bytes)),
                ("disk", disk),
                ("schema", f"revision {space.revision}"),
            ]
        )
    )
    if space.total_bytes > _SMALL_BYTES and not _asked():
        return
    with st.spinner("Measuring every table …"):
        found = operation_queries.measured(url)
    _sizes(found)


def _asked() -> bool:
    page.say("Sizes by table are measured when you ask: all of it is read once.")
    if st.button("Measure the tables", key="measure"):
        st.session_state["measured"] = True
    return bool(st.session_state.get("measured"))


def _sizes(found: operation_queries.Measured) -> None:
    at, total = text.second(found.at, clock.zone()), found.sizes.total_bytes
    left, right = st.columns(2, gap="large")
    with left:
        page.section("Forecast", storage.forecast(found.sizes))
        st.html(storage.tiers(found.sizes))
        page.section("Retention", "How long things stay; baselines and open alerts always do.")
        st.html(storage.retention(found.retention, known=found.retention_known))
    with right:
        page.section("Tables", f"Measured at {at}, in {found.seconds:.1f} s.")
        st.html(storage.tables(found.sizes.tables, total))
