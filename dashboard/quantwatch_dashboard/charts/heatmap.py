"""Layer × token heatmap. At most `MAX_CELLS` cells and 2 MB, whatever the prompt."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from quantwatch_dashboard import text
from quantwatch_dashboard.charts import heatmap_marks as marks
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.frame import frame, named
from quantwatch_dashboard.charts.scale import Scale, scale_for
from quantwatch_dashboard.logic.cells import Kind, value_text
from quantwatch_dashboard.logic.grid import TokenGrid
from quantwatch_dashboard.logic.pooling import MAX_CELLS, Pooled, max_pool

_ROW_HEIGHT = 15
_GAPS = 48
"""Up to this many columns, and rows, cells have a gap between them."""
_UPRIGHT = 16
"""Up to this many columns labels are not slanted."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a picture shows: its name, what kind of value, the range of its colors if fixed."""

    title: str
    kind: Kind = "log"
    fixed: tuple[float, float] | None = None
    max_cells: int = MAX_CELLS


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the reader chose: a scope, a token (prompt and position), a stretch of tokens."""

    scope: str | None = None
    token: tuple[int, int] | None = None
    stretch: tuple[int, int] | None = None
    """First and last position, framed on the overview of a long prompt."""


def heatmap(
    grid: TokenGrid,
    look: Look,
    *,
    marked: str | None = None,
    chosen: Chosen | None = None,
) -> go.Figure:
    """Draw a grid, first layer on top. `marked` is the scope that a frame is drawn around.

    Raises ValueError on a grid without cells.
    """
    lowest = look.kind == "bits"
    pooled = max_pool(grid.values, grid.missing, look.max_cells, lowest=lowest)
    scale = scale_for(look.kind, pooled.values, pooled.missing, look.fixed)
    rows = [_row_name(grid, pooled, i) for i in range(len(pooled.row_starts))]
    keys, aliases = _columns(grid, pooled)
    names = {row: marks.culprit(row) if row == marked else text.scope(row) for row in rows}
    figure = go.Figure(_trace(grid, pooled, scale, look, (rows, keys)))
    _layout(figure, names, aliases)
    figure.update_xaxes(title=named(_axis_title(grid, pooled)))
    marks.part_prompts(figure, [grid.places[first].prompt for first in pooled.column_starts])
    if marked in rows:
        marks.frame_row(figure, rows.index(marked), len(keys), palette.CULPRIT)
    if chosen is not None:
        _choose(figure, grid, pooled, rows, chosen)
    return figure


def _choose(
    figure: go.Figure, grid: TokenGrid, pooled: Pooled, rows: list[str], chosen: Chosen
) -> None:
    """Show what was chosen, and let the reader choose something else by a click on a cell."""
    starts = pooled.column_starts
    if chosen.scope in rows:
        marks.frame_row(figure, rows.index(chosen.scope), len(starts), palette.CHOSEN)
    at = grid.column(chosen.token)
    if at is not None:
        marks.column(figure, int(np.searchsorted(starts, at, side="right")) - 1, len(rows))
    if chosen.stretch is not None:
        prompt = grid.places[0].prompt
        found = [grid.column((prompt, position)) for position in chosen.stretch]
        ends = [int(np.searchsorted(starts, j, side="right")) - 1 for j in found if j is not None]
        if len(ends) == 2:
            marks.stretch(figure, ends[0], ends[1], len(rows))
    names = [grid.scopes[first] for first in pooled.row_starts]
    tokens = [(grid.places[j].prompt, grid.places[j].position) for j in starts]
    marks.clickable(figure, names, tokens)


def _layout(figure: go.Figure, rows: dict[str, str], columns: dict[str, str]) -> None:
    """Set both axes; `rows` and `columns` give the shown label of each key."""
    # Above are the numbers of the prompts.
    figure.update_layout(frame(170 + _ROW_HEIGHT * max(12, min(len(rows), 60)), legend=0, above=32))
    figure.update_yaxes(
        type="category", autorange="reversed", automargin=True, showgrid=False, tickfont_size=11,
        labelalias=rows,
    )  # fmt: skip
    figure.update_xaxes(
        type="category", labelalias=columns, tickangle=-60 if len(columns) > _UPRIGHT else 0,
        automargin=True, showgrid=False, tickfont_size=11,
    )  # fmt: skip


def _trace(
    grid: TokenGrid, pooled: Pooled, scale: Scale, look: Look, axes: tuple[list[str], list[str]]
) -> go.Heatmap:
    low, high = scale.bounds
    places, labels = scale.ticks()
    rows, keys = axes
    name = text.label(look.title)
    return go.Heatmap(
        z=scale.place(pooled.values, pooled.missing),
        x=keys,
        y=rows,
        text=_cell_texts(grid, pooled, look.kind),
        hovertemplate=f"<b>%{{y}}</b><br>%{{x}}<br>{name}: %{{text}}<extra></extra>",
        zmin=low,
        zmax=high,
        colorscale=scale.colors(),
        colorbar={
            "tickvals": places, "ticktext": labels, "thickness": 14, "outlinewidth": 0, "len": 1.0,
            "title": {"text": name, "side": "right", "font": {"size": 12}},
        },
        xgap=1 if len(keys) <= _GAPS else 0,
        ygap=1 if len(keys) <= _GAPS and len(rows) <= _GAPS else 0,
    )  # fmt: skip


def _cell_texts(grid: TokenGrid, pooled: Pooled, kind: Kind) -> NDArray[np.str_]:
    """Return value and token of every cell: the axis shows the token's text, hover where it is."""
    where = [_where(grid, pooled, j) for j in range(len(pooled.column_starts))]
    rows = zip(pooled.values.tolist(), pooled.missing.tolist(), _how(grid, pooled), strict=True)
    found = [
        [
            f"{text.NOT_MEASURED if gone else value_text(value, kind)}{how}<br>{there}"
            for value, gone, how, there in zip(values, missing, hows, where, strict=True)
        ]
        for values, missing, hows in rows
    ]
    # An array: of a list Plotly looks at each element, several times.
    return np.array(found)


def _how(grid: TokenGrid, pooled: Pooled) -> list[list[str]]:
    """Return of each cell whether it is an estimate, or stands for some."""
    if grid.estimated is None:
        return [[""] * pooled.values.shape[1]] * pooled.values.shape[0]
    rows = np.logical_or.reduceat(grid.estimated, pooled.row_starts, axis=0)
    found = np.logical_or.reduceat(rows, pooled.column_starts, axis=1)
    word = " (estimated)" if pooled.values.shape == grid.values.shape else " (some estimated)"
    return [[word if each else "" for each in row] for row in found.tolist()]


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


def _span(starts: NDArray[np.int64], index: int, total: int) -> tuple[int, int]:
    last = int(starts[index + 1]) - 1 if index + 1 < len(starts) else total - 1
    return int(starts[index]), last


def _axis_title(grid: TokenGrid, pooled: Pooled) -> str:
    factor = -(-len(grid.places) // len(pooled.column_starts))
    pooling = f"each column shows the worst of {factor} tokens" if factor > 1 else ""
    several = len({place.prompt for place in grid.places}) > 1
    notes = [note for note in ("prompts are numbered on top" if several else "", pooling) if note]
    return f"token ({', '.join(notes)})" if notes else "token"
