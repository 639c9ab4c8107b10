"""What a heatmap shows, in words, and one of its tokens as a line over the layers."""

from collections.abc import Sequence

import plotly.graph_objects as go

from quantwatch.domain import CandidateResult
from quantwatch.metrics.registry import METRICS
from quantwatch_dashboard.charts.layers import layer_chart
from quantwatch_dashboard.components.explain import term
from quantwatch_dashboard.components.markup import Html, tag
from quantwatch_dashboard.logic import naming
from quantwatch_dashboard.logic.cells import Kind, value_text
from quantwatch_dashboard.logic.estimates import error_words
from quantwatch_dashboard.logic.focus import Focus
from quantwatch_dashboard.logic.grid import TokenGrid
from quantwatch_dashboard.logic.lines import Guides, LayerLine
from quantwatch_dashboard.queries import tokens

_HOW = {
    "log": "Colors are logarithmic",
    "bits": "Colors are linear; bright is little room before an overflow",
    "ratio": "Red: more than in the baseline run, blue: less, nearly white: equal; logarithmic",
    "bits change": "Red: less headroom than in the baseline run, blue: more, nearly white: equal",
}


def caption(grid: TokenGrid, metric: str, kind: Kind, candidate: CandidateResult) -> Html:
    """Say how to read the picture, how much was measured and how well, and where it is worst."""
    sentences = f" {_HOW[kind]}. {_share(grid, candidate)} {_worst(grid, kind)}"
    return tag("p", term(metric), f". {sentences.strip()}", class_="qw-soft qw-small")


def _share(grid: TokenGrid, candidate: CandidateResult) -> str:
    if grid.estimated is not None and grid.estimated.any():
        exact = grid.num_measured - int(grid.estimated.sum())
        said = f"{exact:,} of {grid.values.size:,} cells were measured, the others are estimates."
        return f"{said} {error_words(candidate)}"
    said = f"{grid.num_measured:,} of {grid.values.size:,} cells were measured"
    partly = grid.num_measured < grid.values.size
    return f"{said}; grey: not measured, the lens reads a sample of the tokens." if partly else (
        f"{said}."
    )  # fmt: skip


def _worst(grid: TokenGrid, kind: Kind) -> str:
    worst = grid.worst_cell(lowest=kind == "bits")
    if worst is None:
        return ""
    place, value = grid.places[worst[1]], float(grid.values[worst])
    where = f"prompt {place.prompt}, token {place.position} “{place.label()}”"
    return f"Worst: {value_text(value, kind)} at {grid.scopes[worst[0]]}, {where}."


def profile(focus: Focus, scopes: Sequence[str]) -> go.Figure:
    """Draw the chosen token's metric over the layers, of every candidate that has it."""
    lines = []
    for index, candidate in enumerate(focus.result.candidates):
        key = (focus.result.run_id, candidate.name, focus.metric, focus.prompt)
        values = tokens.at_token(focus.url, key, focus.result.suite_hash, focus.position)
        if not values:
            continue
        strong = candidate.name == focus.candidate.name
        line = [values.get(scope) for scope in scopes]
        lines.append(LayerLine(candidate.name, index, line, strong=strong))
    is_log = METRICS[focus.metric].log_scale
    unit = naming.axis(focus.metric)
    return layer_chart(lines, scopes, unit=unit, is_log=is_log, guides=Guides(None, focus.layer))
