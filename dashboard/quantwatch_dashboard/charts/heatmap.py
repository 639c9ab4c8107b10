"""Layer × token heatmap. At most `MAX_CELLS` cells and 2 MB, whatever the prompt."""

import re

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.grid import TokenGrid
from quantwatch_dashboard.charts.pooling import Pooled, max_pool
from quantwatch_dashboard.charts.scale import LogScale, log_scale

_ROW_HEIGHT = 15
_GAPS = 48
"""Up to this many columns cells have a gap between them."""
_UPRIGHT = 16
"""Up to this many columns labels are not slanted."""
_PARTED, _WIDE_ENOUGH = 64, 0.02
"""Up to this many prompts are parted; a prompt's number needs this share of the width."""


def heatmap(
    grid: TokenGrid,
    *,
    title: str,
    fixed: tuple[float, float] | None = None,
    marked: str | None = None,
) -> go.Figure:
    """Draw a grid, first layer on top. `marked` is the scope that a frame is drawn around.

    Raises ValueError on a grid without cells.
    """
    pooled = max_pool(grid.values, grid.missing)
    scale = log_scale(pooled.values, pooled.missing, fixed)
    rows = [_row_name(grid, pooled, i) for i in range(len(pooled.row_starts))]
    keys, aliases = _columns(grid, pooled)
    figure = go.Figure(_trace(grid, pooled, scale, title, rows, keys))
    _layout(figure, {row: _short(row, row == marked) for row in rows}, aliases)
    figure.update_xaxes(title={"text": _axis_title(grid, pooled), "font_size": 12})
    _part_prompts(figure, [grid.places[first].prompt for first in pooled.column_starts])
    if marked in rows:
        _frame(figure, rows.index(marked), len(keys))
    return figure


def _layout(figure: go.Figure, rows: dict[str, str], columns: dict[str, str]) -> None:
    """Set both axes; `rows` and `columns` give the shown label of each key."""
    figure.update_layout(
        height=170 + _ROW_HEIGHT * max(12, min(len(rows), 60)),
        margin={"l": 8, "r": 8, "t": 32, "b": 8},
    )
    figure.update_yaxes(
        type="category", autorange="reversed", automargin=True, showgrid=False, tickfont_size=11,
        labelalias=rows,
    )  # fmt: skip
    figure.update_xaxes(
        type="category", labelalias=columns, tickangle=-60 if len(columns) > _UPRIGHT else 0,
        automargin=True, showgrid=False, tickfont_size=11,
    )  # fmt: skip


def _part_prompts(figure: go.Figure, prompts: list[int]) -> None:
    """Part the columns of different prompts by a line and number those wide enough for it."""
    starts = [j for j, prompt in enumerate(prompts) if j == 0 or prompt != prompts[j - 1]]
    if not 1 < len(starts) <= _PARTED:
        return
    ends = [*starts[1:], len(prompts)]
    wide = len(prompts) * _WIDE_ENOUGH
    # All at once: Plotly copies the whole list for each shape that is added alone.
    figure.layout.shapes = [
        {"type": "line", "x0": j - 0.5, "x1": j - 0.5, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": "#FFFFFF", "width": 2.5}}
        for j in starts[1:]
    ]  # fmt: skip
    figure.layout.annotations = [
        {"x": (j + end - 1) / 2, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False,
         "text": str(prompts[j]), "font": {"size": 11, "color": palette.MUTED}}
        for j, end in zip(starts, ends, strict=True)
        if end - j > wide
    ]  # fmt: skip


def _trace(
    grid: TokenGrid, pooled: Pooled, scale: LogScale, title: str, rows: list[str], keys: list[str]
) -> go.Heatmap:
    low, high = scale.bounds
    places, labels = scale.ticks()
    return go.Heatmap(
        z=scale.place(pooled.values, pooled.missing),
        x=keys,
        y=rows,
        text=_cell_texts(grid, pooled),
        hovertemplate=f"<b>%{{y}}</b><br>%{{x}}<br>{text.label(title)}: %{{text}}<extra></extra>",
        zmin=low,
        zmax=high,
        colorscale=scale.colors(),
        colorbar={
            "tickvals": places, "ticktext": labels, "thickness": 14, "outlinewidth": 0, "len": 1.0,
            "title": {"text": text.label(title), "side": "right", "font": {"size": 12}},
        },
        xgap=1 if len(keys) <= _GAPS else 0,
        ygap=1 if len(keys) <= _GAPS else 0,
    )  # fmt: skip


def _cell_texts(grid: TokenGrid, pooled: Pooled) -> list[list[str]]:
    """Return value and token of every cell: the axis shows the token's text, hover where it is."""
    where = [_where(grid, pooled, j) for j in range(len(pooled.column_starts))]
    return [
        [
            f"{text.NOT_MEASURED if gone else text.number(value)}<br>{there}"
            for value, gone, there in zip(values, missing, where, strict=True)
        ]
        for values, missing in zip(pooled.values.tolist(), pooled.missing.tolist(), strict=True)
    ]


def _where(grid: TokenGrid, pooled: Pooled, column: int) -> str:
    first, last = _span(pooled.column_starts, column, len(grid.places))
    place, end = grid.places[first], grid.places[last]
    span = f"tokens {place.position}–{end.position}" if last > first else f"token {place.position}"
    return f"prompt {place.prompt}, {span}"


def _row_name(grid: TokenGrid, pooled: Pooled, i: int) -> str:
    first, last = _span(pooled.row_starts, i, len(grid.scopes))
    names = grid.scopes
    return text.label(names[first] if first == last else f"{names[first]} … {names[last]}")


def _columns(grid: TokenGrid, pooled: Pooled) -> tuple[list[str], dict[str, str]]:
    """Return a unique key per column and the token's text, which is not unique."""
    keys = [f"c{j}" for j in range(len(pooled.column_starts))]
    shown = [text.label(grid.places[first].label()) for first in pooled.column_starts]
    several = len(keys) < len(grid.places)
    return keys, {k: f"{s} …" if several else s for k, s in zip(keys, shown, strict=True)}


def _short(row: str, marked: bool) -> str:
    """Return `L14` for layers.14, `L14 mlp` for layers.14.mlp; other scopes stay."""
    short = re.sub(r"\blayers\.(\d+)(?:\.)?", r"L\1 ", row).strip()
    return f'<b style="color:{palette.CULPRIT}">{short}</b>' if marked else short


def _span(starts: NDArray[np.int64], index: int, total: int) -> tuple[int, int]:
    last = int(starts[index + 1]) - 1 if index + 1 < len(starts) else total - 1
    return int(starts[index]), last


def _axis_title(grid: TokenGrid, pooled: Pooled) -> str:
    factor = -(-len(grid.places) // len(pooled.column_starts))
    pooling = f"each column shows the worst of {factor} tokens" if factor > 1 else ""
    several = len({place.prompt for place in grid.places}) > 1
    notes = [note for note in ("prompts are numbered on top" if several else "", pooling) if note]
    return f"token ({', '.join(notes)})" if notes else "token"


def _frame(figure: go.Figure, row: int, columns: int) -> None:
    figure.add_shape(
        type="rect", x0=-0.5, x1=columns - 0.5, y0=row - 0.5, y1=row + 0.5,
        line={"color": "#FFFFFF", "width": 3}, layer="above",
    )  # fmt: skip
    figure.add_shape(
        type="rect", x0=-0.5, x1=columns - 0.5, y0=row - 0.5, y1=row + 0.5,
        line={"color": palette.CULPRIT, "width": 1.5}, layer="above",
    )  # fmt: skip
