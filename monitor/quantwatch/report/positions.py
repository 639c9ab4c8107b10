"""KL by position in a prompt, for every report format."""

from collections.abc import Sequence
from typing import Any

from quantwatch.domain import PositionRange, RunResult, ranges_of
from quantwatch.report.numbers import Number, as_fields
from quantwatch.report.svg import bars

Table = list[tuple[str, PositionRange | None, PositionRange | None]]


def table(result: RunResult, candidate: str) -> Table:
    """Return a candidate's ranges by position: name, output KL, lens KL (None: not measured)."""
    found = {(each.first, each.metric): each for each in ranges_of(result.capture, candidate)}
    names = {each.first: each.name for each in found.values()}
    return [
        (names[first], found.get((first, "logit_kl")), found.get((first, "lens_kl")))
        for first in sorted(names)
    ]


def mean(found: PositionRange | None) -> Number:
    """Return the mean of a range; without a finite value it is NaN where something was measured."""
    if found is None or found.mean is not None:
        return Number.of(None if found is None else found.mean)
    return Number(None, "nan" if found.num_nonfinite else "missing")


def documents(result: RunResult, candidate: str) -> list[dict[str, Any]]:
    """Return the ranges as JSON data, in the manner of the run's document."""
    found = []
    for _, output, lens in table(result, candidate):
        here = output or lens
        assert here is not None  # a range is one of something
        numbers = {"logit_kl": output and _numbers(output), "lens_kl": lens and _numbers(lens)}
        found.append({"first": here.first, "last": here.last, **numbers})
    return found


def _numbers(found: PositionRange) -> dict[str, Any]:
    numbers = {"mean": mean(found), "se": Number.of(found.se)}
    return {"n": found.n, "num_nonfinite": found.num_nonfinite, **as_fields(numbers)}


def markdown(result: RunResult, candidate: str, title: str) -> list[str]:
    """Return a table of one row per metric; nothing when all positions lie in one range."""
    rows = table(result, candidate)
    if len(rows) < 2:
        return []
    lines = [["position", *(name for name, *_ in rows)]]
    lines += [["output KL", *(mean(output).text() for _, output, _ in rows)]]
    lines += [["lens KL", *(mean(lens).text() for *_, lens in rows)]]
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return [title, "", shown[0], "|---" * (len(rows) + 1) + "|", *shown[1:], ""]


def drawing(result: RunResult, candidate: str) -> str:
    """Return bars of the output KL by position as SVG; nothing for a single range."""
    rows = table(result, candidate)
    if len(rows) < 2:
        return ""
    title = "Output KL by position in the prompt, nats"
    return bars([mean(row[1]) for row in rows], [row[0] for row in rows], frozenset(), title)


def cells(rows: Table) -> Sequence[tuple[str, ...]]:
    """Return the rows of a table: range, positions, mean ± error of both metrics."""
    return [(name, *_said(output), *_said(lens)) for name, output, lens in rows]


def _said(found: PositionRange | None) -> tuple[str, str]:
    count = "–" if found is None else f"{found.n:,}"
    error = Number.of(None if found is None else found.se)
    return f"{mean(found).text()} ± {error.text(2)}", count
