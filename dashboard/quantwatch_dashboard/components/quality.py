"""A check's candidates side by side: the newest run, each against its own baseline."""

from collections.abc import Mapping, Sequence

from quantwatch.store.marks import CandidateMark, RunMark
from quantwatch.store.records import SeriesPoint
from quantwatch_dashboard import text
from quantwatch_dashboard.components.candidates import swatch
from quantwatch_dashboard.components.checks import times
from quantwatch_dashboard.components.explain import sentence
from quantwatch_dashboard.components.markup import Html, table, tag
from quantwatch_dashboard.components.verdict import candidate_badge
from quantwatch_dashboard.logic.summaries import Band, CheckSummary
from quantwatch_dashboard.logic.trends import value_of

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
    headers = [
        tag("th", "Candidate", scope="col"),
        tag("th", "Verdict", scope="col"),
        *(tag("th", name, class_="n", scope="col", title=sentence(metric) or None)
          for name, metric in _NUMBERS.items()),
    ]  # fmt: skip
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
               class_="name")  # fmt: skip
    bits = "–" if each.bits_per_weight is None else f"{each.bits_per_weight:.2f}"
    cells = (
        _kl(kl), change, text.percent(value_of(agreement) if agreement else None), bits,
        text.size(each.size_bytes),
    )  # fmt: skip
    verdict = tag("td", candidate_badge(each.verdict))
    return [name, verdict, *(tag("td", cell, class_="n") for cell in cells)]


def _kl(point: SeriesPoint | None) -> str:
    value = value_of(point) if point is not None else None
    if point is None or point.se is None:
        return text.number(value)
    return text.plus_minus(value, point.se)


def _change(point: SeriesPoint | None, band: Band | None, why_not: str) -> Html:
    """Say how the value compares with its baseline; the verdict says whether that matters."""
    if why_not:
        return tag("span", "not comparable", class_="qw-soft", title=why_not)
    value = value_of(point) if point is not None else None
    if value is None or band is None:
        return tag("span", "–", class_="qw-soft")
    if band.baseline <= 0:
        return tag("span", "baseline is 0", class_="qw-soft")
    within = band.low <= value <= band.high
    below = "within the noise" if within else f"{text.signed(value - band.baseline, 2)} nats"
    return tag("span", times(value / band.baseline), tag("span", below, class_="qw-sub"))
