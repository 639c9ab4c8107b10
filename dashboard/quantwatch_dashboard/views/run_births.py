"""Where non-finite values are born: the first place of each prompt, and a map of one prompt."""

import streamlit as st

from quantwatch_dashboard.charts.births import MAX_POINTS, birth_map
from quantwatch_dashboard.components import births, page, picture
from quantwatch_dashboard.logic import series
from quantwatch_dashboard.logic.focus import Focus
from quantwatch_dashboard.logic.nonfinite import Births
from quantwatch_dashboard.queries import tokens as token_queries


def show(focus: Focus) -> None:
    """Show the birth map of the chosen candidate; nothing when every value is finite."""
    result = focus.result
    counted = series.num_nonfinite(result)
    if not any(counted.values()):
        return
    page.section(
        "Where values stop being finite",
        "For each token the first place, in forward order, at which NaN or an infinity appears."
        " What lies behind it only inherits.",
    )
    st.html(births.candidates(result, counted))
    key = (focus.url, result.run_id, focus.candidate.name, result.suite_hash)
    found = token_queries.births(*key) if counted.get(focus.candidate.name) else ()
    if not found:
        page.say(f"{focus.candidate.name} is finite wherever its tokens are kept.")
        return
    left, right = st.columns([3, 2], gap="medium")
    with left:
        name = result.run_id, focus.candidate.name
        _map(focus, token_queries.births_in(focus.url, name, focus.prompt, result.suite_hash))
    with right:
        st.html(births.prompts(found, result.run_id, focus.candidate.name))


def _map(focus: Focus, here: Births) -> None:
    """Show one prompt's births token by token."""
    if not len(here):
        words = f"Prompt {focus.prompt} is finite; choose one from the table."
        page.say(words)
        return
    prompts = token_queries.prompts(focus.url, focus.result.suite_hash)
    tokens = next(p.num_tokens for p in prompts if p.index == focus.prompt)
    figure = birth_map(here.earliest(MAX_POINTS), series.scopes(focus.candidate), tokens)
    alt = "First place that is not finite, by token"
    picture.choose(figure, "births", alt, f"{focus.file_name}-births")
    if len(here) > MAX_POINTS:
        words = f"The earliest {MAX_POINTS:,} of {len(here):,} tokens."
        page.hint(words)
