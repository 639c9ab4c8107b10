"""What a cell of a heatmap holds, and how it is read."""

import math
from typing import Literal

from quantwatch_dashboard import text

Kind = Literal["log", "bits", "ratio", "bits change"]
"""Errors; headroom; log2 of a ratio of errors; a difference of headrooms, positive is worse."""


def value_text(value: float, kind: Kind) -> str:
    """Return a cell's value in words: a number, bits, or how it differs from another run's."""
    if kind == "log":
        return text.number(value)
    if kind == "bits":
        return f"{text.number(value)} bits"
    if value == 0:
        return "equal"
    if not math.isfinite(value):
        return {math.inf: "new: 0 or finite before", -math.inf: "gone: 0 or finite now"}.get(
            value, "not finite in both"
        )
    if kind == "ratio":
        return text.factor(value)
    return f"{text.number(abs(value))} bits {'less' if value > 0 else 'more'}"
