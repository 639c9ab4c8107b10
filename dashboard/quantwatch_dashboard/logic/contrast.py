"""Two candidates held against each other: numbers, and which differences are clear. Pure.

A is before, B is after: a difference is B − A.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quantwatch.baselines.differences import compares, noise_of_difference
from quantwatch.domain import MODEL, CandidateResult, Comparison, RunResult, is_layer
from quantwatch.metrics.registry import METRICS
from quantwatch.report.figures import forward_order
from quantwatch_dashboard import text
from quantwatch_dashboard.logic import naming
from quantwatch_dashboard.logic.figures import figures_of

Tests = Mapping[tuple[str, str], Comparison]
HEADLINES = (
    ("logit_kl", "mean"), ("logit_kl", "p99"), ("logit_kl", "max"), ("served_kl", "mean"),
    ("top1_agreement", "mean"), ("ppl_ratio", "mean"), ("topk_logit_deviation_k5", "mean"),
)  # fmt: skip
"""Metric and statistic of every row of the table, the derived ones included."""
LAYERED = ("lens_kl", "isolated_error", "rel_error")
_BROKEN = {"B": "worse", "A": "better"}
TESTED = (*dict.fromkeys(metric for metric, _ in HEADLINES), *LAYERED)


@dataclass(frozen=True, slots=True)
class Side:
    """One candidate of one run."""

    result: RunResult
    candidate: CandidateResult

    @property
    def key(self) -> tuple[str, str]:
        """Run and candidate."""
        return self.result.run_id, self.candidate.name

    @property
    def layers(self) -> tuple[str, ...]:
        """The whole layers that were measured."""
        return tuple(str(scope) for scope in figures_of(self.candidate).layers)

    def value(self, metric: str, scope: str = MODEL, statistic: str = "mean") -> float | None:
        """Return one number; NaN and ±∞ as themselves, None when it was not measured."""
        figures = figures_of(self.candidate)
        if metric == naming.PPL_RATIO:
            return text.plain(figures.perplexities[2])
        return text.plain(figures.number(metric, scope, statistic))


@dataclass(frozen=True, slots=True)
class Row:
    """One number of both sides. `test` is None where nothing was paired."""

    metric: str
    statistic: str
    a: float | None
    b: float | None
    test: Comparison | None = None
    noise: float = 0.0
    """How far noise alone can move it."""
    incomparable: bool = False
    """Whether a difference would be none of the candidates."""

    @property
    def difference(self) -> float | None:
        """B − A; None when one of them was not measured."""
        if self.incomparable or self.a is None or self.b is None:
            return None
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class Finding:
    """What a difference means: `tone` is worse, better, same, or unknown."""

    tone: str
    words: str


def headlines(a: Side, b: Side, tests: Tests) -> tuple[Row, ...]:
    """Return the rows of the table; those that neither side has are left out."""
    rows = []
    for metric, statistic in HEADLINES:
        values = a.value(metric, statistic=statistic), b.value(metric, statistic=statistic)
        test = tests.get((metric, MODEL)) if statistic == "mean" else None
        if values != (None, None):
            rows.append(Row(metric, statistic, *values, test, _noise(a, b, metric, MODEL)))
    return tuple(rows)


def by_layer(a: Side, b: Side, tests: Tests, metric: str) -> tuple[tuple[str, Row], ...]:
    """Return one metric at every whole layer of either side, in forward order."""
    places = sorted({*a.layers, *b.layers}, key=forward_order)
    return tuple(
        (
            place,
            Row(metric, "mean", a.value(metric, place), b.value(metric, place),
                tests.get((metric, place)), _noise(a, b, metric, place)),
        )
        for place in places
    )  # fmt: skip


def apart(row: Row) -> Row:
    """Return a row of two that can't be compared: both values, and no difference."""
    return replace(row, test=None, incomparable=True)


def finding(row: Row) -> Finding:
    """Say whether a difference is more than chance and noise, and which way it goes."""
    if (broken := _broken(row)) is not None:
        return Finding(_BROKEN[broken], f"not finite in {broken} alone")
    unknown = _untold(row)
    difference, test = row.difference, row.test
    if unknown is not None or difference is None or test is None:
        return Finding("unknown", unknown or "not paired")
    if difference == 0 and test.p == 1:
        return Finding("same", "equal")
    if not test.established:
        return Finding("same", "within chance")
    if abs(difference) <= row.noise:
        return Finding("same", "below the noise floor")
    worse = (difference > 0) == (_direction(row.metric) == "lower")
    return Finding("worse" if worse else "better", f"clearly {'worse' if worse else 'better'}")


def _broken(row: Row) -> str | None:
    """Return which side alone has a number that isn't finite: that is no matter of chance."""
    if row.incomparable or row.a is None or row.b is None:
        return None
    finite = math.isfinite(row.a), math.isfinite(row.b)
    return {(True, False): "B", (False, True): "A"}.get(finite)


def _untold(row: Row) -> str | None:
    """Return why nothing can be told of a difference, None when something can."""
    test = row.test
    if row.incomparable:
        return "not comparable"
    if row.difference is None:
        return "not measured in both"
    if test is None:
        return "no test of this number" if row.statistic != "mean" else "not paired"
    if test.lost:
        return f"{len(test.lost)} prompts are finite in one only"
    is_equal = row.difference == 0 and test.p == 1
    return None if test.is_enough or is_equal else f"too few prompts to tell: {test.num_prompts}"


def family(tests: Tests) -> dict[tuple[str, str, str], Comparison]:
    """Return the comparisons that are decided together: the output's, and every whole layer's."""
    return {
        ("b", metric, scope): test
        for (metric, scope), test in tests.items()
        if scope == MODEL or is_layer(scope)
    }


def summary(rows: Sequence[Row]) -> Finding:
    """Say in one line how B stands against A, by the output KL and by whatever else is clear."""
    for side, tone in _BROKEN.items():
        if broken := [row for row in rows if _broken(row) == side]:
            return Finding(tone, f"{side} is not finite in {_names(broken)}; the other one is")
    marks = [(row, finding(row)) for row in rows]
    worse = [row for row, found in marks if found.tone == "worse"]
    better = [row for row, found in marks if found.tone == "better"]
    if worse and better:
        words = f"B is worse in {_names(worse)} and better in {_names(better)}"
        return Finding("worse", words)
    if worse or better:
        which = worse or better
        return Finding(
            "worse" if worse else "better",
            f"B is clearly {'worse' if worse else 'better'}: {_names(which)}",
        )
    if any(row.test is not None and row.test.lost for row in rows):
        return Finding("unknown", "Not all values are finite in both: they can't be told apart")
    if any(found.tone == "same" for _, found in marks):
        return Finding("same", "No difference beyond chance")
    return Finding("unknown", "Both are shown; whether they differ can't be told")


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(naming.title(row.metric) for row in rows))


def _direction(metric: str) -> str:
    return "lower" if metric == naming.PPL_RATIO else METRICS[metric].direction


def _noise(a: Side, b: Side, metric: str, scope: str) -> float:
    """Return what noise can do to the difference, by the larger floor of both runs."""
    values = a.value(metric, scope), b.value(metric, scope)
    if metric not in METRICS or not compares(metric) or None in values:
        return 0.0
    floors = [side.result.noise_floor.get((metric, scope), 0.0) for side in (a, b)]
    return noise_of_difference(metric, max(floors), values[1] or 0.0, values[0] or 0.0)
