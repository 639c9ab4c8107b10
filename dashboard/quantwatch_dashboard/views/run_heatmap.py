"""The layer × token heatmap with what the reader can switch, and a sentence on what it shows."""

import streamlit as st

from quantwatch.domain import CandidateResult, RunResult, is_layer
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
_NORMALISED = (1e-3, 1.0)
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
        grid = _tokens(url, result, candidate, metric, grid, wanted)
    shown = grid.rows([s for s in grid.scopes if s != "model"]) if parts else _layers(grid)
    _draw(shown, candidate, metric, None if fit else _RANGES[metric], "heatmap")


def all_prompts(
    url: str, result: RunResult, candidate: CandidateResult, metric: str, *, normalised: bool
) -> None:
    """Show one metric at the measured tokens of all prompts."""
    found = queries.measured_tokens(url, result.run_id, candidate.name, metric, result.suite_hash)
    assert found is not None, "the metric was chosen from the stored blocks"
    shown = _layers(found).measured_only()
    if normalised:
        _draw(shown.normalised(), candidate, metric, _NORMALISED, "topk", "÷ the layer's largest")
    else:
        _draw(shown, candidate, metric, _RANGES[metric], "topk")


def _tokens(
    url: str,
    result: RunResult,
    candidate: CandidateResult,
    metric: str,
    grid: TokenGrid,
    wanted: str,
) -> TokenGrid:
    if wanted == "every":
        return grid
    if wanted == "prompt":
        return grid.measured_only()
    run_id, name, suite = result.run_id, candidate.name, result.suite_hash
    return queries.measured_tokens(url, run_id, name, metric, suite) or grid


def _layers(grid: TokenGrid) -> TokenGrid:
    return grid.rows([s for s in grid.scopes if is_layer(s) or s in ("embedding", "final_norm")])


def _draw(
    grid: TokenGrid, candidate: CandidateResult, metric: str,
    fixed: tuple[float, float] | None, key: str, title: str | None = None,
) -> None:  # fmt: skip
    if not grid.values.size:
        st.html(tag("p", "Nothing of this metric was measured here.", class_="qw-soft"))
        return
    spec = METRICS[metric]
    marked = series.culprit_layer(candidate)
    figure = heatmap(grid, title=title or spec.title, fixed=fixed, marked=marked)
    alt = f"{spec.title} of {candidate.name} by layer and token"
    st.plotly_chart(figure, key=key, config={"displaylogo": False}, alt=alt)
    name = tag("b", f"{spec.title}, {spec.unit}. " if spec.unit != "1" else f"{spec.title}. ")
    st.html(tag("p", name, f"{spec.formula}. {_words(grid)}", class_="qw-soft qw-small"))


def _words(grid: TokenGrid) -> str:
    """Say what the picture shows: how much was measured, and where it is worst."""
    share = f"{grid.num_measured:,} of {grid.values.size:,} cells were measured."
    worst = grid.worst_cell()
    if worst is None:
        return share
    place = grid.places[worst[1]]
    where = (
        f"{grid.scopes[worst[0]]}, prompt {place.prompt}, token {place.position} “{place.label()}”"
    )
    return f"{share} Worst: {text.number(float(grid.values[worst]))} at {where}."
