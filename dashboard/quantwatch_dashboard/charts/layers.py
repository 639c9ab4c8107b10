"""One line per candidate over the layers, on a log axis that says the truth about 0, NaN and ∞."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import plotly.graph_objects as go

from quantwatch.domain import layer_index
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette

Value = float | None


@dataclass(frozen=True, slots=True)
class LayerLine:
    """One candidate's value per place; None is "not measured". `index` chooses its color."""

    name: str
    index: int
    values: Sequence[Value]
    strong: bool = False
    marked: frozenset[int] = field(default_factory=frozenset)
    """Places with an alert: drawn with a red ring."""
    culprit: int | None = None
    """The place that gets the annotation `label`."""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """A log axis with a row for exact zeros below and one for non-finite values above."""

    low: int
    high: int
    has_zero: bool
    has_nonfinite: bool

    @property
    def zero(self) -> float:
        """Where an exact 0 is drawn."""
        return float(10.0 ** (self.low - 0.7))

    @property
    def nonfinite(self) -> float:
        """Where NaN and infinities are drawn."""
        return float(10.0 ** (self.high + 0.7))

    def place(self, value: Value) -> float | None:
        """Return the height at which a value is drawn; None leaves a gap."""
        if value is None:
            return None
        if not math.isfinite(value):
            return self.nonfinite
        return value if value > 0 else self.zero

    def ticks(self) -> tuple[list[float], list[str]]:
        """Return tick heights and labels."""
        step = max(1, math.ceil((self.high - self.low) / 7))
        decades = list(range(self.low, self.high + 1, step))
        heights = [10.0**d for d in decades]
        labels = [f"{10.0**d:g}" if -4 < d < 4 else f"1e{d}".replace("-", "−") for d in decades]
        if self.has_zero:
            heights, labels = [self.zero, *heights], ["0 (exact)", *labels]
        if self.has_nonfinite:
            heights, labels = [*heights, self.nonfinite], [*labels, "NaN, ∞"]
        return heights, labels

    def range(self) -> tuple[float, float]:
        """Return the visible range in decades."""
        return self.low - (1.1 if self.has_zero else 0.15), self.high + (
            1.1 if self.has_nonfinite else 0.25
        )


def layer_chart(
    lines: Sequence[LayerLine],
    places: Sequence[str],
    *,
    unit: str,
    threshold: float | None = None,
    guide: int | None = None,
) -> go.Figure:
    """Draw candidates over places. `threshold` is a dashed line, `guide` marks the culprit."""
    axis = _axis([v for line in lines for v in line.values], threshold)
    figure = go.Figure()
    for line in lines:
        figure.add_trace(_trace(line, axis, places))
        if line.marked:
            figure.add_trace(_rings(line, axis))
    for line in lines:
        if line.culprit is not None:
            _annotate(figure, line, axis, len(places))
    if threshold is not None:
        _threshold(figure, threshold)
    if guide is not None:
        figure.add_vline(
            x=guide, line={"color": palette.CULPRIT, "width": 1, "dash": "dot"}, opacity=0.55
        )
    _layout(figure, axis, places, unit)
    return figure


def _axis(values: list[Value], threshold: float | None) -> Axis:
    known = [v for v in values if v is not None]
    positive = [v for v in known if math.isfinite(v) and v > 0]
    within = positive + ([threshold] if threshold else [])
    low = math.floor(math.log10(min(within))) if within else -6
    high = math.ceil(math.log10(max(within))) if within else 0
    low = max(low, high - 12)
    return Axis(
        low,
        max(high, low + 1),
        has_zero=any(v == 0 for v in known),
        has_nonfinite=any(not math.isfinite(v) for v in known),
    )


def _trace(line: LayerLine, axis: Axis, places: Sequence[str]) -> go.Scatter:
    color, dash, marker = palette.series_style(line.index)
    points = _points(line, places)
    return go.Scatter(
        x=[at for at, _, _ in points],
        y=[axis.place(value) for _, value, _ in points],
        customdata=[[text.label(place), text.number(value)] for _, value, place in points],
        name=text.label(line.name),
        mode="lines+markers",
        line={
            "color": color,
            "dash": "solid" if line.strong else dash,
            "width": 3.2 if line.strong else 1.6,
        },
        marker={
            "symbol": [_symbol(value, marker) for _, value, _ in points],
            "size": 7 if line.strong else 5,
            "color": color,
        },
        opacity=1 if line.strong else 0.85,
        zorder=0 if line.strong else 1,
        hovertemplate="%{customdata[0]}: <b>%{customdata[1]}</b><extra>%{fullData.name}</extra>",
    )


def _points(line: LayerLine, places: Sequence[str]) -> list[tuple[int | None, Value, str]]:
    """Return place, value and name, with a gap between layers and what is no layer."""
    points: list[tuple[int | None, Value, str]] = []
    for at, (place, value) in enumerate(zip(places, line.values, strict=True)):
        if at and (layer_index(place) is None) != (layer_index(places[at - 1]) is None):
            points.append((None, None, ""))
        points.append((at, value, place))
    return points


def _symbol(value: Value, marker: str) -> str:
    if value is not None and not math.isfinite(value):
        return "x"
    return f"{marker}-open" if value == 0 else marker


def _rings(line: LayerLine, axis: Axis) -> go.Scatter:
    at = sorted(line.marked)
    return go.Scatter(
        x=at,
        y=[axis.place(line.values[i]) for i in at],
        mode="markers",
        marker={
            "symbol": "circle-open",
            "size": 15,
            "color": palette.CULPRIT,
            "line": {"width": 2.5},
        },
        showlegend=False,
        hoverinfo="skip",
        zorder=2,
    )


def _annotate(figure: go.Figure, line: LayerLine, axis: Axis, num_places: int) -> None:
    assert line.culprit is not None
    height = axis.place(line.values[line.culprit])
    if height is None:
        return
    right_half = line.culprit > num_places / 2
    figure.add_annotation(
        x=line.culprit, y=math.log10(height), text=f"<b>{text.label(line.label)}</b>",
        ax=-46 if right_half else 46, ay=-14, xanchor="right" if right_half else "left",
        showarrow=True, arrowhead=0, arrowcolor=palette.CULPRIT, arrowwidth=1.5, standoff=8,
        font={"color": palette.CULPRIT, "size": 13},
    )  # fmt: skip


def _threshold(figure: go.Figure, threshold: float) -> None:
    figure.add_hline(y=threshold, line={"color": palette.CULPRIT, "width": 1.2, "dash": "dash"})
    # Plotly places shapes on a log axis by value, annotations by its logarithm.
    figure.add_annotation(
        x=0, xref="paper", xanchor="left", y=math.log10(threshold), yanchor="bottom",
        text=f"threshold {threshold:g}", showarrow=False,
        font={"color": palette.CULPRIT, "size": 11},
    )  # fmt: skip


def _layout(figure: go.Figure, axis: Axis, places: Sequence[str], unit: str) -> None:
    heights, labels = axis.ticks()
    ticks = _place_ticks(places)
    figure.update_layout(
        height=360,
        margin={"l": 8, "r": 8, "t": 44, "b": 8},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 12}},
        hovermode="closest",
    )
    figure.update_yaxes(
        type="log", range=axis.range(), tickvals=heights, ticktext=labels,
        title={"text": unit, "font_size": 12}, zeroline=False,
    )  # fmt: skip
    figure.update_xaxes(
        tickvals=list(ticks), ticktext=list(ticks.values()), tickangle=0,
        range=[-0.6, len(places) - 0.4], showgrid=False, zeroline=False,
        title={"text": "layer", "font_size": 12},
    )  # fmt: skip


_ENDS = {"embedding": "emb", "head": "head"}
"""The ends that have a label; the final norm lies between the last layer and the head."""


def _place_ticks(places: Sequence[str]) -> dict[int, str]:
    """Return a label per place, at round layer numbers and at most 16 or so."""
    step = max(1, math.ceil(len(places) / 16))
    indices = [layer_index(place) for place in places]
    ends = {at: _ENDS[place] for at, place in enumerate(places) if place in _ENDS}
    beside = {at + side for at in ends for side in (-1, 1)}
    layers = {at: str(n) for at, n in enumerate(indices) if n is not None and n % step == 0}
    return ends | {at: label for at, label in layers.items() if at not in beside}
