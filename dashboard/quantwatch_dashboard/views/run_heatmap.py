"""The layer × token heatmap with what the reader can switch, and a sentence on what it shows."""

import plotly.graph_objects as go
import streamlit as st

from quantwatch.domain import EMBEDDING, FINAL_NORM, MODEL, CandidateResult, RunResult, is_layer
from quantwatch.metrics.registry import METRICS
from quantwatch_dashboard import queries, series, text
from quantwatch_dashboard.charts.grid import TokenGrid
from quantwatch_dashboard.charts.heatmap import heatmap
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.components.picker import flag, pick

_RANGES = {
    "rel_error": (1e-4, 1.0),
    "lens_kl": (1e-5, 10.0),
    "topk_logit_deviation_k5": (1e-3, 10.0),
    "topk_logit_deviation_k3": (1e-3, 10.0),
}
"""Fixed, so that pictures of two prompts, candidates or runs can be compared."""
_NORMALISED = (1e-2, 1.0)
_TOKENS = {
    "all": "measured tokens, all prompts",
    "prompt": "measured tokens, this prompt",
    "every": "every token, this prompt",
}


def show(url: str, result: RunResult, candidate: CandidateResult, prompt: int, metric: str) -> None:
    """Show one metric of one candidate; sampled metrics over all prompts unless one is wanted."""
    key = (result.run_id, candidate.name, metric, prompt)
    grid = queries.grid(url, key, result.suite_hash)
    assert grid is not None, "the metric was chosen from the stored blocks"
    one, two, three = st.columns([2, 2, 3], vertical_alignment="center")
    with one:
        fit = flag("Fit colors to this picture", "fit")
    with two:
        finer = any(s.startswith("layers.") and not is_layer(s) for s in grid.scopes)
        parts = finer and flag("Attention and MLP rows", "parts")
    if _layers(grid).missing.all(axis=0).any():
        with three:
            wanted = pick("Tokens", "tokens", list(_TOKENS), "all", _TOKENS.__getitem__)
        grid = _tokens(url, result.suite_hash, key, grid, wanted)
    shown = grid.rows(set(grid.scopes) - {MODEL}) if parts else _layers(grid)
    marked = series.outlier(result, candidate)
    _draw(shown, heatmap_of(shown, metric, fixed=not fit, marked=marked), metric, "heatmap")


def all_prompts(
    url: str, result: RunResult, candidate: CandidateResult, metric: str, *, normalised: bool
) -> None:
    """Show one metric at the measured tokens of all prompts."""
    key = (result.run_id, candidate.name, metric)
    found = queries.measured_tokens(url, *key, result.suite_hash)
    assert found is not None, "the metric was chosen from the stored blocks"
    grid = _layers(found).measured_only()
    marked = series.outlier(result, candidate)
    if normalised:
        scaled = grid.normalised()
        figure = heatmap_of(scaled, metric, marked=marked, title="÷ the layer's largest")
    else:
        figure = heatmap_of(grid, metric, marked=marked)
    _draw(grid, figure, metric, "topk")


def _tokens(
    url: str, suite_hash: str, key: queries.BlockKey, grid: TokenGrid, wanted: str
) -> TokenGrid:
    if wanted == "all":
        return queries.measured_tokens(url, *key[:3], suite_hash) or grid
    return _layers(grid).measured_only() if wanted == "prompt" else grid


def heatmap_of(
    grid: TokenGrid,
    metric: str,
    *,
    fixed: bool = True,
    marked: str | None = None,
    title: str | None = None,
) -> go.Figure | None:
    """Return the picture of a grid in its metric's colors, None when nothing was measured."""
    if not grid.values.size:
        return None
    usual = _NORMALISED if title is not None else _RANGES[metric]
    shown = title or METRICS[metric].title
    return heatmap(grid, title=shown, fixed=usual if fixed else None, marked=marked)


def _layers(grid: TokenGrid) -> TokenGrid:
    return grid.rows([s for s in grid.scopes if is_layer(s) or s in (EMBEDDING, FINAL_NORM)])


def _draw(grid: TokenGrid, figure: go.Figure | None, metric: str, key: str) -> None:
    if figure is None:
        st.html(tag("p", "Nothing of this metric was measured here.", class_="qw-soft"))
        return
    spec = METRICS[metric]
    alt = f"{spec.title} by layer and token"
    st.plotly_chart(figure, key=key, config={"displaylogo": False}, alt=alt)
    name = tag("b", f"{spec.title}, {spec.unit}. " if spec.unit != "1" else f"{spec.title}. ")
    st.html(tag("p", name, f"{spec.formula}. {_words(grid)}", class_="qw-soft qw-small"))


def _words(grid: TokenGrid) -> str:
    """Say what the picture shows: how much was measured, and where it is worst."""
    share = f"{grid.num_measured:,} of {grid.values.size:,} cells were measured"
    partly = grid.num_measured < grid.values.size
    share += "; grey: not measured, the lens reads a sample of the tokens." if partly else "."
    worst = grid.worst_cell()
    if worst is None:
        return share
    place = grid.places[worst[1]]
    where = (
        f"{grid.scopes[worst[0]]}, prompt {place.prompt}, token {place.position} “{place.label()}”"
    )
    return f"{share} Worst: {text.number(float(grid.values[worst]))} at {where}."
