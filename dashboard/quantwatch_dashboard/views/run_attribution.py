"""Attribution: which parts of a candidate cost how much of its KL."""

import streamlit as st

from quantwatch.domain import RunResult
from quantwatch_dashboard.charts.palette import series_style
from quantwatch_dashboard.components import attribution, facts, page
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.queries import attributions, connection


def show(url: str, result: RunResult) -> None:
    """Show each attributed candidate; the command that makes an attribution where there is none."""
    page.section(
        "Attribution: whose share it is",
        "Each part of the candidate is put into the reference alone, and the rest is run again."
        " Direction is its KL ÷ that of noise of the same size: above 1 the error's direction"
        " hurts more than its size.",
    )
    found = attributions.of_run(url, result.run_id)
    if not found:
        page.say("Nothing is attributed yet. It takes about half a forward pass per layer, twice:")
        st.html(facts.command(f"{connection.program()} attribute {result.run_id}"))
        return
    places = [candidate.name for candidate in result.candidates]
    for each in found:
        st.html(tag("h3", each.candidate, class_="qw-small"))
        st.html(attribution.facts(each, result.num_prompts))
        # Over the whole width: names of linear layers push the last column out of half of it.
        color = series_style(places.index(each.candidate))[0]
        st.html(attribution.shares(each, result.run_id, color))
        if len(each.parts) > attribution.MOST:
            page.hint(f"The costliest {attribution.MOST} of {len(each.parts)} parts.")
