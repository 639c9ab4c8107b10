"""A prompt colored by its output KL, and both models' first choices at one token."""

from dataclasses import asdict

import numpy as np
import pandas as pd
import streamlit as st

from quantwatch.domain import CandidateResult, RunResult
from quantwatch_dashboard import queries, series, text
from quantwatch_dashboard.charts.grid import TokenGrid
from quantwatch_dashboard.components import page
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.components.picker import pick
from quantwatch_dashboard.components.tokens import prompt_text, top_tables, worst_table


def show(url: str, result: RunResult, candidate: CandidateResult, prompt: int) -> None:
    """Show the prompt, the chosen token's top logits, the layer table and the worst tokens."""
    page.section(
        "Token view",
        "The prompt, redder where the output KL is larger. Choose a token to see what both models"
        " would say next.",
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
        st.html(prompt_text(grid, list(names).index(position)))
    with right:
        _top(url, result, candidate, prompt, int(position))
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


def _top(
    url: str, result: RunResult, candidate: CandidateResult, prompt: int, position: int
) -> None:
    found = queries.top_logits(url, result.run_id, candidate.name, prompt, result.suite_hash)
    first, values = found if found is not None else (0, np.zeros((5, 0, 0)))
    if not 0 <= position - first < values.shape[1]:
        st.html(tag("p", "The top logits of this token are not stored.", class_="qw-soft"))
        return
    st.html(top_tables(values[:, position - first], queries.token_texts(url, result)))


def _layers(result: RunResult, candidate: CandidateResult) -> None:
    page.section("Layer table", f"Means of {candidate.name}; sort by a click on a column.")
    rows = series.layer_rows(candidate)
    number = st.column_config.NumberColumn
    frame = pd.DataFrame([asdict(row) for row in rows])
    if not frame.num_nonfinite.any():
        frame = frame.drop(columns="num_nonfinite")
    st.dataframe(
        frame,
        hide_index=True,
        height=420,
        placeholder="–",
        column_config={
            "layer": "Layer",
            "mean_kl": number("Mean KL, nats", format="%.3g"),
            "p99_kl": number("p99", format="%.3g"),
            "max_kl": number("max", format="%.3g"),
            "top3_logit_deviation": number("Mean top-3 logit deviation", format="%.3g"),
            "isolated_error": number("Isolated error", format="%.3g"),
            "rel_error": number("Relative error", format="%.3g"),
            "num_nonfinite": number("Not finite"),
        },
    )
    name = f"{result.run_id}-{candidate.name}-layers.csv"
    st.download_button("Download CSV", series.layer_csv(rows), name, "text/csv", on_click="ignore")
