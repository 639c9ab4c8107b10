"""What all pictures have in common: margins, the legend above, titles of axes."""

from typing import Any

from quantwatch.domain import Json
from quantwatch_dashboard import text
from quantwatch_dashboard.charts.axis import Axis

_LEGEND_LINE = 28
"""Height of a line of the legend, which lies above the picture."""


def frame(height: int, *, legend: int = 1, above: int = 16) -> dict[str, Any]:
    """Return the layout of a picture with so many lines of legend, and room for what is above."""
    found: dict[str, Any] = {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": above + _LEGEND_LINE * legend, "b": 8},
        "hovermode": "closest",
        "showlegend": legend > 0,
    }
    if legend:
        found["legend"] = {
            "orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 12},
        }  # fmt: skip
    return found


def named(words: str) -> Json:
    """Return an axis's title."""
    return {"text": text.label(words), "font": {"size": 12}}


def scaled(axis: Axis, words: str) -> Json:
    """Return the layout of an axis with its ticks and title."""
    heights, labels = axis.ticks()
    return {
        "type": axis.type, "range": axis.range, "tickvals": heights, "ticktext": labels,
        "title": named(words), "zeroline": False, "tickangle": 0,
    }  # fmt: skip
