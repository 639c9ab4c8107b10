"""The layer × token heatmap with what the reader can switch, and a sentence on what it shows."""

from dataclasses import replace

import plotly.graph_objects as go
import streamlit as st

from quantwatch_dashboard.charts.heatmap import Chosen, Look, heatmap
from quantwatch_dashboard.components import heatmap_words, page, picture, window
from quantwatch_dashboard.components.address import flag, pick
from quantwatch_dashboard.logic import difference, series
from quantwatch_dashboard.logic.focus import HEADROOM, Focus
from quantwatch_dashboard.logic.grid import TokenGrid
from quantwatch_dashboard.logic.rows import has_parts, whole_layers, with_parts
from quantwatch_dashboard.queries import tokens

_COLOR_BAR = 96
"""Width of the color bar that the picture below has, so that both are as wide."""
_OVERVIEW_CELLS = 10_000
"""Enough for a picture of a few centimeters."""
_TOKENS = {
    "all": "measured tokens, all prompts",
    "prompt": "measured tokens, this prompt",
    "every": "every token, this prompt",
}


def show(focus: Focus) -> None:
    """Show one metric of one candidate; sampled metrics over all prompts unless one is wanted."""
    grid = tokens.grid(focus.url, focus.key, focus.result.suite_hash)
    if grid is None:
        page.say("This metric is not stored for this prompt.")
        return
    one, two, three = st.columns([2, 2, 3], vertical_alignment="center")
    with one:
        fit = flag("Fit colors to this picture", "fit")
    with two:
        parts = has_parts(grid) and flag("Attention and MLP rows", "parts")
    wanted = "every"
    if whole_layers(grid).missing.all(axis=0).any():
        with three:
            wanted = pick("Tokens", "tokens", list(_TOKENS), "all", _TOKENS.__getitem__)
    shown = _tokens(focus, grid, wanted)
    shown = with_parts(shown) if parts else whole_layers(shown)
    shown = shown if wanted == "every" else shown.measured_only()
    look = Look(focus.title, focus.kind, focus.range(fit=fit))
    if wanted == "all" or not shown.values.size:
        _draw(focus, shown, look, "heatmap")
        return
    with three:
        ends = shown.places[0].position, shown.places[-1].position
        part = window.stretch(ends, focus.position, focus.prompt)
    if ends[1] - ends[0] >= 2 * window.WIDTH:
        _overview(focus, shown, look, part)
    _draw(focus, shown.between(*part), look, "heatmap")
    _this_token(focus, shown)


def _tokens(focus: Focus, grid: TokenGrid, wanted: str) -> TokenGrid:
    """Return the tokens that are wanted; held against the baseline's, if that is asked for."""
    key, suite = focus.key, focus.result.suite_hash
    if wanted == "all":
        grid = tokens.measured_tokens(focus.url, *key[:3], suite) or grid
    if focus.before is None:
        return grid
    old = focus.before.run_id, *key[1:]
    before = tokens.grid(focus.url, old, suite)
    if wanted == "all":
        before = tokens.measured_tokens(focus.url, *old[:3], suite)
    if before is None:
        return grid.between(-1, -1)
    return (difference.loss if focus.metric == HEADROOM else difference.ratio)(grid, before)


def _overview(focus: Focus, grid: TokenGrid, look: Look, part: tuple[int, int]) -> None:
    """Show all of a long prompt, pooled, with the stretch framed that is shown below it."""
    words = (
        f"All {len(grid.places):,} tokens, pooled so that the worst stays. The blue frame is the"
        " stretch below; a click chooses a token and moves it there."
    )
    page.hint(words)
    coarse = replace(look, max_cells=_OVERVIEW_CELLS)
    figure = heatmap(grid, coarse, chosen=Chosen(stretch=part))
    figure.update_layout(height=240, margin_r=_COLOR_BAR)
    # One range of colors for both pictures needs one color bar.
    figure.update_traces(showscale=look.fixed is None, selector={"type": "heatmap"})
    figure.update_xaxes(showticklabels=False)
    alt = f"{look.title}, the whole prompt"
    picture.choose(figure, "overview", alt, f"{focus.file_name}-prompt{focus.prompt}-overview")


def _draw(focus: Focus, grid: TokenGrid, look: Look, key: str) -> None:
    if not grid.values.size or grid.missing.all():
        page.say("Nothing of this metric was measured here.")
        return
    figure = drawn(focus, grid, look)
    picture.choose(figure, key, f"{look.title} by layer and token", f"{focus.file_name}-{key}")
    st.html(heatmap_words.caption(grid, focus.metric, look.kind, focus.candidate))


def drawn(focus: Focus, grid: TokenGrid, look: Look) -> go.Figure:
    """Return a grid with the place that broke and what the reader chose."""
    marked = series.outlier(focus.result, focus.candidate)
    chosen = Chosen(focus.layer, focus.token)
    return heatmap(grid, look, marked=marked, chosen=chosen)


def _this_token(focus: Focus, grid: TokenGrid) -> None:
    """Show the chosen token through the layers, unless it was not measured there."""
    at = grid.column(focus.token)
    if at is None or focus.before is not None or grid.missing[:, at].all():
        return
    words = f"Token {focus.position} through the layers, all candidates"
    opened = st.expander(words, key="profile-opened", on_change="rerun")
    # Closed it costs nothing: of each candidate a matrix of this prompt is read for it.
    if not opened.open:
        return
    figure = heatmap_words.profile(focus, whole_layers(grid).scopes)
    with opened:
        picture.choose(figure, "profile", "The chosen token by layer", f"{focus.file_name}-token")
