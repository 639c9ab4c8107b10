"""One bar per place, the one that broke in red: where it is, at a glance."""

import math
from collections.abc import Sequence

from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.charts.svg import data_uri

WIDTH, HEIGHT = 300, 84
_SHORTEST = 1.5
"""Height of a bar that would be too short to be seen."""


def strip(values: Sequence[float | None], marked: int | None = None) -> str:
    """Return a data URI of the values on a linear scale from 0; a non-finite one is the tallest.

    Places that were not measured have no bar. Raises ValueError without places.
    """
    if not values:
        raise ValueError("a strip needs at least one place")
    finite = [v for v in values if v is not None and math.isfinite(v)]
    largest = max(finite, default=0.0) or 1.0
    step = WIDTH / len(values)
    bars = (
        _bar(at * step, step, value, largest, palette.CULPRIT if at == marked else palette.MUTED)
        for at, value in enumerate(values)
        if value is not None
    )
    ground = f'<rect x="0" y="{HEIGHT - 1}" width="{WIDTH}" height="1" fill="{palette.MUTED}"/>'
    return data_uri("".join(bars) + ground, WIDTH, HEIGHT)


def _bar(x: float, step: float, value: float, largest: float, color: str) -> str:
    share = value / largest if math.isfinite(value) else 1.0
    tall = max(_SHORTEST, share * (HEIGHT - 2))
    place = f'x="{x + step * 0.12:.2f}" y="{HEIGHT - 1 - tall:.2f}"'
    return f'<rect {place} width="{step * 0.76:.2f}" height="{tall:.2f}" fill="{color}"/>'
