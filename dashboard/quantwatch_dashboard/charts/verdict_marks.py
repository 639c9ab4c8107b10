"""Verdicts on pictures: a shape and a color each, that hold on light and on dark paper."""

from dataclasses import dataclass

from quantwatch.domain import Verdict


@dataclass(frozen=True, slots=True)
class Shape:
    """A Plotly symbol, its color (None is the candidate's own), its size and its word."""

    symbol: str
    color: str | None
    size: int
    word: str


VERDICT_SHAPES = {
    Verdict.REGRESSION: Shape("x", "#E5484D", 9, "✕ Regression"),
    Verdict.INCONCLUSIVE: Shape("diamond", "#8E6FE0", 9, "? Inconclusive"),
    Verdict.WARN: Shape("triangle-up", "#C2410C", 10, "! Warning"),
    Verdict.IMPROVEMENT: Shape("star", "#3B82F6", 10, "↑ Improvement"),
    Verdict.PASS: Shape("circle", None, 5, "✓ Pass"),
}
NOT_JUDGED = Shape("circle-open", None, 6, "not judged")
FAILED_COLOR = "#8B919B"


def shape(verdict: Verdict | None) -> Shape:
    """Return how a verdict is drawn."""
    return NOT_JUDGED if verdict is None else VERDICT_SHAPES[verdict]
