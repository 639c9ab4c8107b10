"""Verdicts on pictures: a shape and a color each, that hold on light and on dark paper."""

from dataclasses import dataclass

from quantwatch.domain import Verdict
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.logic.marks import VERDICTS


@dataclass(frozen=True, slots=True)
class Shape:
    """A Plotly symbol, its color (None is the candidate's own), its size and its word."""

    symbol: str
    color: str | None
    size: int
    word: str


def _shape(verdict: Verdict, symbol: str, color: str | None, size: int) -> Shape:
    known = VERDICTS[verdict]
    return Shape(symbol, color, size, f"{known.icon} {known.word}")


VERDICT_SHAPES = {
    Verdict.REGRESSION: _shape(Verdict.REGRESSION, "x", palette.CULPRIT, 9),
    Verdict.INCONCLUSIVE: _shape(Verdict.INCONCLUSIVE, "diamond", palette.UNDECIDED, 9),
    Verdict.WARN: _shape(Verdict.WARN, "triangle-up", palette.WARNED, 10),
    Verdict.IMPROVEMENT: _shape(Verdict.IMPROVEMENT, "star", palette.IMPROVED, 10),
    Verdict.PASS: _shape(Verdict.PASS, "circle", None, 5),
}
NOT_JUDGED = Shape("circle-open", None, 6, "not judged")


def shape(verdict: Verdict | None) -> Shape:
    """Return how a verdict is drawn."""
    return NOT_JUDGED if verdict is None else VERDICT_SHAPES[verdict]
