"""Operations: who changed what."""

import streamlit as st

from quantwatch_dashboard import clock
from quantwatch_dashboard.components import audit, page, trouble
from quantwatch_dashboard.components.address import choose, every
from quantwatch_dashboard.components.markup import link, tag
from quantwatch_dashboard.queries import operations as operation_queries
from quantwatch_dashboard.text import ANY

_MOST_CHANGES = 200


def show(url: str) -> None:
    """Show who changed what, of everything or of one thing."""
    subject = st.query_params.get("subject")
    page.section("Audit", f"Who changed what, newest first; the last {_MOST_CHANGES}.")
    if subject:
        back = link("show everything", "operations", show="audit")
        st.html(tag("p", "Only of ", tag("b", subject), " · ", back, class_="qw-wrap"))
    found = operation_queries.changes(url, _MOST_CHANGES, subject)
    if not found:
        words = "What a person or the service changes is written down with who, when and what."
        st.html(trouble.state("Nothing was changed yet", words))
        return
    with st.columns([1, 3])[0]:
        actors = sorted({entry.actor for entry in found})
        who = choose("Who", "who", [ANY, *actors], every("people"), "stretch")
    shown = [entry for entry in found if who in (ANY, entry.actor)]
    st.html(audit.table_of(shown, clock.now(), clock.zone()))
