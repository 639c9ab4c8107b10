"""A prompt colored by its output KL, and both models' first choices at one token."""

import numpy as np
import streamlit as st

from quantwatch.domain import CandidateResult, RunResult
from quantwatch_dashboard import queries, series, text
from quantwatch_dashboard.charts.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.components import page
from quantwatch_dashboard.components.layers import COLUMNS, layer_table, worst_first
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.components.picker import pick
from quantwatch_dashboard.components.tokens import (
    prompt_text,
    top_caption,
    top_tables,
    worst_table,
)


def show(url: str, result: RunResult, candidate: CandidateResult, prompt: int) -> None:
    """Show the prompt, the chosen token's top logits, the layer table and the worst tokens."""
    page.section(
        "Token view",
        "The prompt, redder where the output KL is larger; no color at a hundredth of its largest."
        " Choose a token to see what both models would say next.",
    )
    key = (result.run_id, candidate.name, "logit_kl", prompt)
    grid = queries.grid(url, key, result.suite_hash)
    assert grid is not None, "prompts without output KL are not offered"
    names = {str(place.position): _name(grid, j) for j, place in enumerate(grid.places)}
    worst = grid.worst_cell()
    default = str(grid.places[worst[1] if worst else 0].position)
    left, right = st.columns([5, 6], gap="medium")
    with left:
        position = pick("Token", "position", list(names), default, names.__getitem__)
        at = list(names).index(position)
        st.html(prompt_text(grid, at))
    with right:
        st.html(top_caption(grid, at))
        _top(url, result, candidate, grid.places[at])
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _layers(result, candidate)
    with right:
        page.section("Worst tokens", "Largest output KL of all prompts. A click opens the token.")
        found = queries.worst_tokens(url, result.run_id, candidate.name, result.suite_hash)
        st.html(worst_table(found, result.run_id, candidate.name))


def _name(grid: TokenGrid, j: int) -> str:
    place, value = grid.places[j], float(grid.values[0, j])
    shown = text.NOT_MEASURED if grid.missing[0, j] else f"{text.number(value)} nats"
    return f"{place.position} · {place.label(24)} · {shown}"


def _top(url: str, result: RunResult, candidate: CandidateResult, place: TokenPlace) -> None:
    key = (result.run_id, candidate.name, place.prompt, result.suite_hash)
    found = queries.top_logits(url, *key)
    first, values = found if found is not None else (0, np.zeros((5, 0, 0)))
    at = place.position - first
    if not 0 <= at < values.shape[1]:
        st.html(tag("p", "The top logits of this token are not stored.", class_="qw-soft"))
        return
    st.html(top_tables(values[:, at], queries.token_texts(url, result)))


def _layers(result: RunResult, candidate: CandidateResult) -> None:
    page.section("Layer table", f"Means of {candidate.name} unless the column says otherwise.")
    rows = series.layer_rows(candidate)
    names = {"layer": "layer"} | COLUMNS
    by = pick("Sort by", "sort", list(names), "layer", names.__getitem__)
    st.html(layer_table(worst_first(rows, by), series.outlier(result, candidate)))
    name = f"{result.run_id}-{candidate.name}-layers.csv"
    st.download_button("Download CSV", series.layer_csv(rows), name, "text/csv", on_click="ignore")
