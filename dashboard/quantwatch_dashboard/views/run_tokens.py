"""A prompt colored by its output KL, both models' first choices at one token, the worst tokens."""

import numpy as np
import streamlit as st

from quantwatch_dashboard.components import page
from quantwatch_dashboard.components.address import pick
from quantwatch_dashboard.components.layers import columns, layer_table, worst_first
from quantwatch_dashboard.components.tokens import (
    prompt_text,
    top_caption,
    top_tables,
    worst_table,
)
from quantwatch_dashboard.logic import exports, series
from quantwatch_dashboard.logic.focus import Focus
from quantwatch_dashboard.logic.layer_rows import layer_rows
from quantwatch_dashboard.logic.toplogits import top_rows
from quantwatch_dashboard.queries import tokens
from quantwatch_dashboard.views import run_downloads


def show(focus: Focus) -> None:
    """Show the prompt, the chosen token's top logits, the layer table and the worst tokens."""
    page.section(
        "Token view",
        "The prompt, redder where the output KL is larger; no color at a hundredth of its largest."
        " Beside it what both models would say after the chosen token.",
    )
    key = (focus.result.run_id, focus.candidate.name, "logit_kl", focus.prompt)
    grid = tokens.grid(focus.url, key, focus.result.suite_hash)
    assert grid is not None, "prompts without output KL are not offered"
    at = grid.column(focus.token) or 0
    left, right = st.columns([4, 7], gap="medium")
    with left:
        st.html(prompt_text(grid, at))
    with right:
        st.html(top_caption(grid, at))
        _top(focus)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _layers(focus)
    with right:
        _worst(focus)
    run_downloads.matrices(focus)


def _top(focus: Focus) -> None:
    result = focus.result
    key = (result.run_id, focus.candidate.name, focus.prompt, result.suite_hash)
    found = tokens.top_logits(focus.url, *key)
    first, values = found if found is not None else (0, np.zeros((5, 0, 0)))
    at = focus.position - first
    if not 0 <= at < values.shape[1]:
        page.say("The top logits of this token are not stored.")
        return
    words = tokens.token_texts(focus.url, result)
    st.html(top_tables(values[:, at], words))
    rows = top_rows(values[:, at])
    name = f"{result.run_id}-{focus.candidate.name}-prompt{focus.prompt}-token{focus.position}"
    run_downloads.csv("Top tokens, CSV", lambda: exports.top_csv(rows, words), f"{name}-top.csv")


def _layers(focus: Focus) -> None:
    page.section(
        "Layer table", f"Means of {focus.candidate.name} unless the column says otherwise."
    )
    rows = layer_rows(focus.candidate)
    names = {"layer": "layer"} | columns(rows)
    by = pick("Sort by", "sort", list(names), "layer", names.__getitem__)
    marked = series.outlier(focus.result, focus.candidate)
    st.html(layer_table(worst_first(rows, by), marked, focus.layer))
    name = f"{focus.result.run_id}-{focus.candidate.name}-layers.csv"
    run_downloads.csv("Layer table, CSV", lambda: exports.layer_csv(rows), name)


def _worst(focus: Focus) -> None:
    page.section("Worst tokens", "Largest output KL of all prompts. A click opens the token.")
    result, name = focus.result, focus.candidate.name
    found = tokens.worst_tokens(focus.url, result.run_id, name, result.suite_hash)
    st.html(worst_table(found, result.run_id, name))
    if found:
        file = f"{result.run_id}-{name}-worst-tokens.csv"
        run_downloads.csv("Worst tokens, CSV", lambda: exports.worst_csv(found), file)
