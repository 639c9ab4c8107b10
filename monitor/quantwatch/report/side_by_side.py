"""Two runs side by side: the figures of each candidate before and after."""

from typing import Any

from quantwatch.domain import CandidateResult, RunResult
from quantwatch.report.figures import Figures
from quantwatch.report.numbers import MISSING, Number
from quantwatch.report.words import culprit

COLUMNS = ("candidate", "figure", "before", "after", "change")
Row = dict[str, Any]
_METRICS = (
    ("logit_kl", "mean"),
    ("logit_kl", "p99"),
    ("logit_kl", "max"),
    ("top1_agreement", "mean"),
)


def side_by_side(before: RunResult, after: RunResult) -> list[Row]:
    """Return one row per candidate and figure; a candidate that one run lacks has null there.

    Two runs of one candidate each are paired whatever its name: a comparison names it by recipe.
    """
    if len(before.candidates) == len(after.candidates) == 1:
        (a,), (b,) = before.candidates, after.candidates
        return _rows(a.name if a.name == b.name else f"{a.name} → {b.name}", a, b)
    old = {candidate.name: candidate for candidate in before.candidates}
    new = {candidate.name: candidate for candidate in after.candidates}
    names = dict.fromkeys([*old, *new])
    return [row for name in names for row in _rows(name, old.get(name), new.get(name))]


def texts(rows: list[Row]) -> list[list[str]]:
    """Return the rows as texts for a table."""
    return [[_text(row[column]) for column in COLUMNS] for row in rows]


def _rows(name: str, old: CandidateResult | None, new: CandidateResult | None) -> list[Row]:
    a, b = _numbers(old), _numbers(new)
    words = {
        "verdict": (_verdict(old), _verdict(new)),
        "culprit": (_culprit(old), _culprit(new)),
    }
    said = [_row(name, figure, *pair, None) for figure, pair in words.items()]
    measured = [_number_row(name, figure, a[figure], b[figure]) for figure in a]
    return said + measured


def _numbers(candidate: CandidateResult | None) -> dict[str, Number]:
    figures = Figures(candidate) if candidate is not None else None
    numbers = {
        f"{metric}.{name}": MISSING if figures is None else figures.number(metric, name=name)
        for metric, name in _METRICS
    }
    numbers["ppl_ratio"] = MISSING if figures is None else figures.perplexities[2]
    variant = candidate.variant if candidate is not None else None
    numbers["bits_per_weight"] = Number.of(None if variant is None else variant.bits_per_weight)
    return numbers


def _number_row(name: str, figure: str, old: Number, new: Number) -> Row:
    a, b = old.value, new.value
    change = b - a if a is not None and b is not None else None
    return _row(name, figure, *(_said(old), _said(new)), change)


def _row(name: str, figure: str, before: Any, after: Any, change: Any) -> Row:
    return dict(zip(COLUMNS, (name, figure, before, after, change), strict=True))


def _said(number: Number) -> float | str | None:
    """Return a finite value, the kind of a non-finite one, None when it wasn't measured."""
    if number.value is not None:
        return number.value
    return None if number.kind == "missing" else number.kind


def _verdict(candidate: CandidateResult | None) -> str | None:
    return None if candidate is None else str(candidate.verdict or "failed")


def _culprit(candidate: CandidateResult | None) -> str | None:
    return None if candidate is None else culprit(candidate)


def _text(value: Any) -> str:
    return Number(value).text(5) if isinstance(value, float) else str(value or "–")
