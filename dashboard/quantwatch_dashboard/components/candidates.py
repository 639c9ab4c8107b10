"""The candidates of a run side by side, and the four numbers of the one that matters."""

from quantwatch.domain import CandidateResult, Measurement, RunResult
from quantwatch.report.figures import Figures
from quantwatch.report.numbers import Number
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.components.markup import Html, join, table, tag
from quantwatch_dashboard.components.verdict import candidate_badge

_COLUMNS = (
    "Output KL, nats", "p99", "max", "Top-1 agreement", "Perplexity ratio", "Top-5 logit dev.",
    "Leaked mass", "Bits / weight", "Size", "Bit-equal",
)  # fmt: skip


def swatch(index: int) -> Html:
    """Return the small square in a candidate's chart color."""
    return tag("span", class_="qw-swatch", style=f"--series: {palette.series_style(index)[0]}")


def tiles(candidate: CandidateResult) -> Html:
    """Return the headline numbers of one candidate."""
    figures = Figures(candidate)
    reference, own, ratio = figures.perplexities
    worst, agreement = figures.number("logit_kl", name="max"), figures.number("top1_agreement")
    deviation = figures.number("topk_logit_deviation_k5")
    shown = (
        ("Output KL", _mean_se(figures, "logit_kl"), "nats, mean ± standard error by prompt"),
        ("Worst token", _digits(worst), _worst_place(figures.row("logit_kl"))),
        ("Top-1 agreement", text.percent(text.plain(agreement)), "same first choice, ties count"),
        ("Perplexity ratio", _digits(ratio, 5), f"{_digits(reference, 4)} → {_digits(own, 4)}"),
        ("Top-5 logit deviation", _digits(deviation), "mean |Δ| over the reference's top 5"),
    )
    return tag("div", *(_tile(*tile) for tile in shown), class_="qw-tiles")


def _digits(shown: Number, digits: int = 3) -> str:
    return text.number(text.plain(shown), digits)


def _tile(key: str, value: str, detail: str) -> Html:
    rows = (tag("div", v, class_=c) for c, v in (("k", key), ("v", value), ("d", detail)))
    return tag("div", *rows, class_="qw-tile")


def _worst_place(row: Measurement | None) -> str:
    if row is None or row.max_prompt is None:
        return "largest output KL of one token"
    return f"prompt {row.max_prompt}, token {row.max_position}"


def _mean_se(figures: Figures, metric: str) -> str:
    row = figures.row(metric)
    mean = text.plain(figures.number(metric))
    return text.plus_minus(mean, row.se) if row is not None and row.se else text.number(mean)


def side_by_side(result: RunResult) -> Html:
    """Return the table of all candidates and, below it, the reference against itself."""
    largest = max((_finite(Figures(c).number("logit_kl")) for c in result.candidates), default=0.0)
    rows = [_row(c, i, largest) for i, c in enumerate(result.candidates)]
    if result.noise_floor:
        rows.append(_floor_row(result))
    headers = [
        tag("th", "Candidate"),
        tag("th", "Verdict"),
        *(tag("th", c, class_="n") for c in _COLUMNS),
    ]
    return table(headers, rows, "qw-candidates")


def _row(candidate: CandidateResult, index: int, largest: float) -> list[object]:
    name = tag("td", swatch(index), candidate.name, _execution(candidate), class_="name")
    verdict = tag("td", candidate_badge(candidate.verdict))
    if candidate.failure is not None:
        return [
            name,
            verdict,
            tag("td", candidate.failure, colspan=len(_COLUMNS), class_="words qw-soft"),
        ]
    return [
        name,
        verdict,
        *(tag("td", cell, class_="n") for cell in _cells(candidate, index, largest)),
    ]


def _execution(candidate: CandidateResult) -> Html:
    shown = candidate.variant.execution if candidate.variant is not None else "not loaded"
    return tag("span", shown, class_="qw-sub")


def _cells(candidate: CandidateResult, index: int, largest: float) -> list[object]:
    figures = Figures(candidate)
    variant = candidate.variant
    kl = figures.number("logit_kl")
    numbers = [figures.number("logit_kl", name="p99"), figures.number("logit_kl", name="max")]
    return [
        join(
            [_mean_se(figures, "logit_kl"), _bar(_finite(kl), largest, index), _nonfinite(figures)]
        ),
        *(_digits(n) for n in numbers),
        text.percent(text.plain(figures.number("top1_agreement"))),
        _digits(figures.perplexities[2], 5),
        _digits(figures.number("topk_logit_deviation_k5")),
        _digits(figures.leaked_mass),
        f"{variant.bits_per_weight:.2f}" if variant else "–",
        text.size(variant.size_bytes if variant else None),
        "yes" if candidate.bit_equal else "no",
    ]


def _finite(shown: Number) -> float:
    return shown.value or 0.0


def _bar(value: float, largest: float, index: int) -> Html:
    """Return a bar on a linear scale: three orders of magnitude less is no bar, and should be."""
    share = 100 * value / largest if largest > 0 else 0.0
    color = palette.series_style(index)[0]
    return tag("span", tag("b", style=f"width: {share:.1f}%; --series: {color}"), class_="qw-bar")


def _nonfinite(figures: Figures) -> Html:
    if not figures.num_nonfinite:
        return Html("")
    return tag("span", f"{figures.num_nonfinite:,} not finite", class_="qw-sub qw-hot")


def _floor_row(result: RunResult) -> list[object]:
    """The largest difference of the reference against itself: smaller differences mean nothing."""
    floors = {
        metric: value for (metric, scope), value in result.noise_floor.items() if scope == "model"
    }
    note = tag("span", "reference against itself, other batches", class_="qw-sub")
    cells = [""] * len(_COLUMNS)
    cells[2] = text.number(floors.get("logit_kl"))
    cells[5] = text.number(floors.get("topk_logit_deviation_k5"))
    return [
        tag("td", "Noise floor", note, class_="name"),
        "",
        *(tag("td", c, class_="n qw-soft") for c in cells),
    ]
