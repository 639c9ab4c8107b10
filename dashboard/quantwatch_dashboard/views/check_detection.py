"""A check's detection power: what tonight's rules would have found, and its canaries."""

import streamlit as st

from quantwatch_dashboard import clock
from quantwatch_dashboard.components import detection, page
from quantwatch_dashboard.components.markup import join, tag
from quantwatch_dashboard.logic.summaries import CheckSummary
from quantwatch_dashboard.queries import detection as queries

_NONE = (
    "This check has no canary: [checks.NAME.canary] in quantwatch.toml plants a small fault in a"
    " copy and tells when it is not found."
)


def show(url: str, summary: CheckSummary) -> None:
    """Show the smallest change that each rule finds, and the planted faults of the last runs."""
    run = summary.decided
    assert run is not None, "only checks with results have rules that judged"
    found = queries.of_run(url, run.run_id)
    if found:
        power = found[0][1][0].power
        page.section(
            "What would have been found",
            f"The smallest change for the worse that a rule finds in {power:.0%} of nights, in the"
            " unit of its metric, at the scope where it takes most (minimum detectable effect).",
        )
        st.html(detection.changes(found, summary.candidates))
    flown = queries.of_check(url, summary.check)
    configured = summary.state.config.get("canary") is not None
    explained = "A fault of known size, planted in a copy, that the rules have to find and locate."
    page.section("Canaries", join([explained, tag("span", " It touches no figure of its run.")]))
    if flown:
        st.html(detection.flights(flown, clock.zone()))
    else:
        page.say(
            "None has been measured yet: the next queued run has one." if configured else _NONE
        )
