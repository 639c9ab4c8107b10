"""What exactly was measured and how to measure it again."""

import streamlit as st

from quantwatch.domain import RunResult
from quantwatch.report.repeat import repeat_command
from quantwatch_dashboard.components import facts, page
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.queries import connection
from quantwatch_dashboard.views import run_downloads


def show(result: RunResult) -> None:
    """Show the command that repeats the run, identity, variants, environment and timings."""
    page.section(
        "Repeat and compare",
        "The command measures the same again; the digests say what would have to be the same.",
    )
    line = repeat_command(result)
    if line:
        st.html(facts.command(connection.addressed(line)))
    else:
        page.say("This run was not started from a command line.")
    if result.candidates:
        run_downloads.whole(result)
    with st.expander("Identity: suite, capture, digests"):
        st.html(facts.identity(result))
        for shown in [result.reference, *(c.variant for c in result.candidates)]:
            if shown is not None:
                st.html(tag("h3", shown.name, class_="qw-small"))
                st.html(facts.variant(shown))
    with st.expander("Environment"):
        st.html(facts.flat(result.environment) if result.environment else tag("p", "Not recorded."))
    with st.expander("Timings"):
        st.html(facts.timings(result.timings_s) if result.timings_s else tag("p", "Not recorded."))
    with st.expander("Capture: coverage, observer effect, padding"):
        st.html(facts.flat(result.capture) if result.capture else tag("p", "Not recorded."))
