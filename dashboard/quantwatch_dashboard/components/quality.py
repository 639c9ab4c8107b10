"""A check's candidates side by side: the newest run, each against its own baseline."""

from collections.abc import Mapping, Sequence

from quantwatch.store.kinds import from_kind
from quantwatch.store.marks import CandidateMark, RunMark
from quantwatch.store.records import SeriesPoint
from quantwatch_dashboard import text
from quantwatch_dashboard.components.explain import numbers
from quantwatch_dashboard.components.markup import Html, soft, table, tag
from quantwatch_dashboard.components.verdict import candidate_badge
from quantwatch_dashboard.components.words import swatch, times
from quantwatch_dashboard.logic.bands import Band
from quantwatch_dashboard.logic.summaries import CheckSummary

_NUMBERS = {
    "Output KL, nats": "logit_kl", "÷ baseline": "", "Top-1 agreement": "top1_agreement",
    "Bits / weight": "", "Size": "",
}  # fmt: skip
"""Column → the metric that its header explains."""


def candidate_table(
    check: CheckSummary,
    mark: RunMark,
    kl: Sequence[SeriesPoint],
    agreement: Sequence[SeriesPoint],
) -> Html:
    """Return one row per candidate of a run."""
    values = _of_run(kl, mark.run_id)
    agreed = _of_run(agreement, mark.run_id)
    bands = dict(zip(check.candidates, check.bands, strict=True))
    headers = ["Candidate", "Verdict", *numbers(_NUMBERS)]
    rows = (
        _row(
            each,
            i,
            (values.get(each.name), agreed.get(each.name)),
            _change(values.get(each.name), bands.get(each.name), check.not_comparable),
        )
        for i, each in enumerate(mark.candidates)
    )
    return table(headers, rows, "qw-quality")


def _of_run(points: Sequence[SeriesPoint], run_id: str) -> Mapping[str, SeriesPoint]:
    return {point.candidate: point for point in points if point.run_id == run_id}


def _row(
    each: CandidateMark,
    index: int,
    measured: tuple[SeriesPoint | None, SeriesPoint | None],
    change: Html,
) -> list[object]:
    kl, agreement = measured
    execution = each.execution or "could not be loaded"
    name = tag("td", swatch(index), each.name, tag("span", execution, class_="qw-sub"),
               class_="qw-name")  # fmt: skip
    bits = text.NONE if each.bits_per_weight is None else f"{each.bits_per_weight:.2f}"
    cells = (
        _kl(kl), change, text.percent(_value(agreement)), bits,
        text.size(each.size_bytes),
    )  # fmt: skip
    verdict = tag("td", candidate_badge(each.verdict))
    return [name, verdict, *(tag("td", cell, class_="qw-n") for cell in cells)]


def _value(point: SeriesPoint | None) -> float | None:
    return None if point is None else from_kind(point.value, point.kind)


def _kl(point: SeriesPoint | None) -> str:
    value = _value(point)
    if point is None or point.se is None:
        return text.number(value)
    return text.plus_minus(value, point.se)


def _change(point: SeriesPoint | None, band: Band | None, why_not: str) -> Html:
    """Say how the value compares with its baseline; the verdict says whether that matters."""
    if why_not:
        return soft("not comparable", why_not)
    value = _value(point)
    if value is None or band is None:
        return soft(text.NONE)
    if band.baseline <= 0:
        return soft("baseline is 0")
    within = band.low <= value <= band.high
    below = "within the noise" if within else f"{text.signed(value - band.baseline, 2)} nats"
    return tag("span", times(value / band.baseline), tag("span", below, class_="qw-sub"))
