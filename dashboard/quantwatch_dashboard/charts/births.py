"""The birth map: for each token the first layer at which it is not a number any more."""

from collections.abc import Sequence

import plotly.graph_objects as go

from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.frame import frame, named
from quantwatch_dashboard.logic.nonfinite import Birth

MAX_POINTS = 4_000
_LOOKS = {
    "NaN": (palette.NAN, "x"),
    "+∞": (palette.POSITIVE_INFINITY, "triangle-up"),
    "−∞": (palette.NEGATIVE_INFINITY, "triangle-down"),
}


def birth_map(births: Sequence[Birth], scopes: Sequence[str], num_tokens: int) -> go.Figure:
    """Draw one prompt's births over all scopes in forward order, the very first one ringed.

    Raises ValueError without a birth.
    """
    if not births:
        raise ValueError("a birth map needs at least one value that is not finite")
    rows = {scope: at for at, scope in enumerate(scopes)}
    shown = sorted(births, key=lambda b: (rows[b.scope], b.place.position))[:MAX_POINTS]
    figure = go.Figure(
        [_points([b for b in shown if b.kind == kind], rows, kind) for kind in _LOOKS]
    )
    first = shown[0]
    figure.add_scatter(
        x=[first.place.position], y=[rows[first.scope]], mode="markers", hoverinfo="skip",
        name="first", marker={"symbol": "circle-open", "size": 18, "color": palette.CULPRIT,
                              "line": {"width": 2.5}},
    )  # fmt: skip
    _layout(figure, scopes, num_tokens)
    return figure


def _points(births: list[Birth], rows: dict[str, int], kind: str) -> go.Scatter:
    color, symbol = _LOOKS[kind]
    return go.Scatter(
        x=[b.place.position for b in births],
        y=[rows[b.scope] for b in births],
        customdata=[[b.scope, b.place.prompt, b.place.position] for b in births],
        text=[f"{text.label(b.scope)}<br>{text.label(b.place.label())}" for b in births],
        hovertemplate=f"{kind} first at %{{text}}, token %{{x}}<extra></extra>",
        mode="markers",
        name=kind,
        showlegend=bool(births),
        marker={"color": color, "symbol": symbol, "size": 8,
                "line": {"width": 1, "color": palette.MUTED}},
    )  # fmt: skip


def _layout(figure: go.Figure, scopes: Sequence[str], num_tokens: int) -> None:
    step = max(1, -(-len(scopes) // 24))
    at = list(range(0, len(scopes), step))
    figure.update_layout(frame(min(560, 150 + 14 * min(len(scopes), 30))))
    figure.update_yaxes(
        tickvals=at, ticktext=[text.label(text.scope(scopes[i])) for i in at],
        range=[len(scopes) - 0.5, -0.5], automargin=True, zeroline=False, tickfont_size=11,
        title=named("first place that is not finite"),
    )  # fmt: skip
    figure.update_xaxes(range=[-0.5, num_tokens - 0.5], zeroline=False, title=named("token"))
