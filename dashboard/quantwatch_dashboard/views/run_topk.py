"""Top-k logit deviation at the measured tokens of all prompts."""

import streamlit as st

from quantwatch_dashboard.charts.heatmap import Look
from quantwatch_dashboard.components import heatmap_words, page, picture
from quantwatch_dashboard.components.address import flag, pick
from quantwatch_dashboard.logic import naming
from quantwatch_dashboard.logic.focus import RANGES, TOPK, Focus
from quantwatch_dashboard.logic.rows import whole_layers
from quantwatch_dashboard.queries import tokens
from quantwatch_dashboard.views.run_heatmap import drawn

_NORMALISED = (1e-2, 1.0)


def show(focus: Focus, metrics: list[str]) -> None:
    """Show the deviation of the reference's top 5 or top 3."""
    kept = [metric for metric in metrics if metric in TOPK]
    if not kept:
        return
    page.section(
        "Top-k logit deviation",
        "How far the candidate's logits lie from the reference's on the reference's top k, read off"
        " at each layer, at the sampled tokens of all prompts.",
    )
    left, middle, _ = st.columns([2, 3, 4], vertical_alignment="bottom")
    with left:
        k = pick("Top k", "k", kept, kept[0], naming.title)
    with middle:
        normalised = flag("Normalised: ÷ the layer's largest", "normalised")
    key = (focus.result.run_id, focus.candidate.name, k)
    found = tokens.measured_tokens(focus.url, *key, focus.result.suite_hash)
    grid = None if found is None else whole_layers(found).measured_only()
    if grid is None or not grid.values.size:
        page.say("Nothing of this metric was measured here.")
        return
    if normalised:
        look = Look("÷ the layer's largest", "log", _NORMALISED)
        figure = drawn(focus, grid.normalised(), look)
    else:
        figure = drawn(focus, grid, Look(f"{naming.title(k)}, logits", "log", RANGES[k]))
    name = f"{focus.result.run_id}-{focus.candidate.name}-{k}"
    picture.choose(figure, "topk", f"{naming.title(k)} by layer and token", name)
    st.html(heatmap_words.caption(grid, k, "log", focus.candidate))
