"""What is drawn over a heatmap: prompts parted, the place that broke, what the reader chose.

Streamlit reports no click on the heatmap itself, so clicks are caught by markers that nobody sees:
one per cell while a browser can bear it, above that one per token and one per layer.
"""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette

_PARTED, _WIDE_ENOUGH = 64, 0.02
"""Up to this many prompts are parted; a prompt's number needs this share of the width."""
_CLICKABLE = 5_000
"""Markers are elements of the page: more of them make it slow."""


def culprit(row: str) -> str:
    """Return the label of the row that broke."""
    return palette.ink(f"<b>{text.scope(row)}</b>", palette.CULPRIT)


def part_prompts(figure: go.Figure, prompts: list[int]) -> None:
    """Part the columns of different prompts by a line and number those wide enough for it."""
    starts = [j for j in range(len(prompts)) if j == 0 or prompts[j] != prompts[j - 1]]
    if not 1 < len(starts) <= _PARTED:
        return
    ends = [*starts[1:], len(prompts)]
    wide = _WIDE_ENOUGH * len(prompts)
    # One by one they would take seconds: adding a shape copies all others.
    figure.layout.shapes = [
        {"type": "line", "x0": j - 0.5, "x1": j - 0.5, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": palette.OUTLINE, "width": 1.2}}
        for j in starts[1:]
    ]  # fmt: skip
    figure.layout.annotations = [
        {"x": (j + end - 1) / 2, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False,
         "text": palette.ink(str(prompts[j])), "font": {"size": 11}}
        for j, end in zip(starts, ends, strict=True)
        if end - j > wide
    ]  # fmt: skip


def frame_row(figure: go.Figure, row: int, columns: int, color: str) -> None:
    """Frame a row: the one that broke, or the one that the reader chose."""
    box = {"x0": -0.5, "x1": columns - 0.5, "y0": row - 0.5, "y1": row + 0.5}
    _outline(figure, box, color)


def column(figure: go.Figure, at: int, rows: int) -> None:
    """Frame the token that the reader chose."""
    box = {"x0": at - 0.5, "x1": at + 0.5, "y0": -0.5, "y1": rows - 0.5}
    _outline(figure, box, palette.CHOSEN)


def stretch(figure: go.Figure, left: int, right: int, rows: int) -> None:
    """Frame the stretch of tokens that is shown below in full."""
    box = {"x0": left - 0.5, "x1": right + 0.5, "y0": -0.5, "y1": rows - 0.5}
    _outline(figure, box, palette.CHOSEN)


def _outline(figure: go.Figure, box: dict[str, float], color: str) -> None:
    """Draw a frame that is seen on any color: white below, its color above."""
    for line in ({"color": palette.OUTLINE, "width": 3}, {"color": color, "width": 1.5}):
        figure.add_shape(type="rect", line=line, layer="above", **box)


def clickable(figure: go.Figure, scopes: Sequence[str], tokens: Sequence[tuple[int, int]]) -> None:
    """Put markers on the cells; each carries its scope, prompt and position, as text."""
    rows, columns = len(scopes), len(tokens)
    if rows * columns <= _CLICKABLE:
        i, j = (each.ravel() for each in np.indices((rows, columns)))
    else:
        i = np.concatenate([np.full(columns, rows // 2), np.arange(rows)])
        j = np.concatenate([np.arange(columns), np.zeros(rows, np.int64)])
    heat = figure.data[0]
    # Arrays: of a list Plotly looks at each element, several times.
    whole = np.array(tokens, np.int64).reshape(-1, 2).astype(np.str_)
    figure.add_scatter(
        x=np.array(heat.x)[j],
        y=np.array(heat.y)[i],
        customdata=np.column_stack([np.array(scopes)[i], whole[j]]),
        text=np.array(heat.text)[i, j],
        hovertemplate=heat.hovertemplate,
        mode="markers",
        marker={"symbol": "square", "size": 11, "opacity": 0, "color": palette.MUTED},
        selected={"marker": {"opacity": 0}},
        unselected={"marker": {"opacity": 0}},
        showlegend=False,
    )
