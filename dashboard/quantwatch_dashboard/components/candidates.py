"""The candidates of a run side by side, and the four numbers of the one that matters."""

from quantwatch.domain import MODEL, CandidateResult, Measurement, RunResult
from quantwatch.report.figures import Figures, Interval
from quantwatch.report.numbers import Number
from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.components.explain import numbers, term
from quantwatch_dashboard.components.markup import Html, bar, join, table, tag
from quantwatch_dashboard.components.tiles import tile
from quantwatch_dashboard.components.tiles import tiles as row_of
from quantwatch_dashboard.components.verdict import candidate_badge
from quantwatch_dashboard.components.words import swatch
from quantwatch_dashboard.logic.figures import bits, figures_of

_COLUMNS = {
    "Output KL, nats": "logit_kl", "p99": "logit_kl",
    "max": "logit_kl", "Top-1 agreement": "top1_agreement", "Perplexity ratio": "nll_difference",
    "Top-5 logit dev.": "topk_logit_deviation_k5", "Leaked mass": "leaked_mass",
    "Bits / weight": "", "Size": "", "Bit-equal": "",
}  # fmt: skip
_MEASURED = (("max", "logit_kl"), ("Top-5 logit dev.", "topk_logit_deviation_k5"))
"""Column → the metric that its header explains."""


def tiles(result: RunResult, candidate: CandidateResult) -> Html:
    """Return the headline numbers of one candidate, each with its interval and noise floor."""
    figures = figures_of(candidate)
    reference, own, ratio = figures.perplexities
    kl = figures.kl_metric
    worst, agreement = figures.number(kl, name="max"), figures.number("top1_agreement")
    deviation = figures.number("topk_logit_deviation_k5")
    floors = noise_floors(result)
    percents = figures.interval("top1_agreement")
    shown = (
        (kl, "Output KL", _mean_se(figures, kl),
         "nats, mean ± standard error by prompt", _bounds(figures, kl)),
        (kl, "Worst token", figures.at_least + _digits(worst), _worst_place(figures.row(kl)), ""),
        ("top1_agreement", "Top-1 agreement", text.percent(text.plain(agreement)),
         "same first choice, ties count", _percents(percents)),
        ("nll_difference", "Perplexity ratio", _digits(ratio, 5),
         f"{_digits(reference, 4)} → {_digits(own, 4)}", _bounds(figures, "ppl_ratio")),
        ("topk_logit_deviation_k5", "Top-5 logit deviation", _digits(deviation),
         "mean |Δ| over the reference's top 5", _bounds(figures, "topk_logit_deviation_k5")),
    )  # fmt: skip
    return row_of(
        tile(term(slug, name), value, detail, bounds, _floor(floors, slug, bounds))
        for slug, name, value, detail, bounds in shown
    )


def noise_floors(result: RunResult) -> dict[str, float]:
    """Return the largest difference of the reference against itself, by metric of the output."""
    return {m: value for (m, scope), value in result.noise_floor.items() if scope == MODEL}


def _bounds(figures: Figures, metric: str) -> str:
    found = figures.interval(metric)
    return "" if found is None else f"95 %: {text.interval(found)}"


def _percents(found: Interval | None) -> str:
    """Return an interval of a share; nobody agrees on more than every token."""
    if found is None:
        return ""
    return f"95 %: {text.percent(found[0])} … {text.percent(min(1.0, found[1]))}"


def _digits(shown: Number, digits: int = 3) -> str:
    return text.number(text.plain(shown), digits)


def _floor(floors: dict[str, float], slug: str, bounds: str) -> str:
    # The floor of the NLL's difference is no floor of a ratio.
    floor = floors.get(slug) if bounds and slug != "nll_difference" else None
    return "" if floor is None else f"noise floor {text.number(floor)}"


def _worst_place(row: Measurement | None) -> str:
    if row is None or row.max_prompt is None:
        return "largest output KL of one token"
    return f"prompt {row.max_prompt}, token {row.max_position}"


def _mean_se(figures: Figures, metric: str) -> str:
    row = figures.row(metric)
    mean = text.plain(figures.number(metric))
    said = text.plus_minus(mean, row.se) if row is not None and row.se else text.number(mean)
    return f"{figures.at_least}{said}"


def side_by_side(result: RunResult) -> Html:
    """Return the table of all candidates and, below it, the reference against itself."""
    known = map(figures_of, result.candidates)
    values = (_finite(each.number(each.kl_metric)) for each in known)
    largest = max(values, default=0.0)
    rows = [_row(c, i, largest) for i, c in enumerate(result.candidates)]
    if result.noise_floor:
        rows.append(_floor_row(result))
    return table(["Candidate", "Verdict", *numbers(_COLUMNS)], rows, "qw-quality")


def _row(candidate: CandidateResult, index: int, largest: float) -> list[object]:
    name = tag("td", swatch(index), candidate.name, _execution(candidate), class_="qw-name")
    verdict = tag("td", candidate_badge(candidate.verdict))
    if candidate.failure is not None:
        return [
            name,
            verdict,
            tag("td", candidate.failure, colspan=len(_COLUMNS), class_="qw-text qw-soft"),
        ]
    return [
        name,
        verdict,
        *(tag("td", cell, class_="qw-n") for cell in _cells(candidate, index, largest)),
    ]


def _execution(candidate: CandidateResult) -> Html:
    shown = candidate.variant.execution if candidate.variant is not None else "not loaded"
    return tag("span", shown, class_="qw-sub")


def _cells(candidate: CandidateResult, index: int, largest: float) -> list[object]:
    figures = figures_of(candidate)
    variant = candidate.variant
    metric = figures.kl_metric
    kl, *numbers = (figures.number(metric, name=name) for name in ("mean", "p99", "max"))
    return [
        join(
            [
                _mean_se(figures, metric),
                bar(_finite(kl) / largest if largest else 0.0, palette.series_style(index)[0]),
                _interval(figures),
                _nonfinite(figures),
                _missing(figures),
            ]
        ),
        *(_digits(n) for n in numbers),
        text.percent(text.plain(figures.number("top1_agreement"))),
        _digits(figures.perplexities[2], 5),
        _digits(figures.number("topk_logit_deviation_k5")),
        _digits(figures.leaked_mass),
        bits(variant),
        text.size(variant.size_bytes if variant else None),
        _equal(candidate, figures),
    ]


def _equal(candidate: CandidateResult, figures: Figures) -> str:
    """Say whether every tap and logit is equal; of a server nobody can tell."""
    if figures.kl_metric == "served_kl":
        return text.NONE
    return "yes" if candidate.bit_equal else "no"


def _interval(figures: Figures) -> Html:
    """Return the interval of the mean, or why it has none."""
    bounds = figures.interval(figures.kl_metric)
    row = figures.row(figures.kl_metric)
    if bounds is not None:
        said = f"95 %: {text.interval(bounds)}"
    elif row is None or row.mean is None:
        said = "no interval: no finite value"
    else:
        said = "no interval: one prompt"
    return tag("span", said, class_="qw-sub")


def _finite(shown: Number) -> float:
    return shown.value or 0.0


def _nonfinite(figures: Figures) -> Html:
    if not figures.num_nonfinite:
        return Html("")
    return tag("span", f"{figures.num_nonfinite:,} not finite", class_="qw-sub qw-hot")


def _missing(figures: Figures) -> Html:
    """Positions that a server's answers are missing for: the figures are of the others."""
    if not figures.num_missing:
        return Html("")
    return tag("span", f"{figures.num_missing:,} missing", class_="qw-sub qw-hot")


def _floor_row(result: RunResult) -> list[object]:
    """The largest difference of the reference against itself: smaller differences mean nothing."""
    floors = noise_floors(result)
    note = tag("span", "reference against itself, other batches", class_="qw-sub")
    cells = [""] * len(_COLUMNS)
    columns = list(_COLUMNS)
    for name, metric in _MEASURED:
        if metric in floors:
            cells[columns.index(name)] = text.number(floors[metric])
    return [
        tag("td", "Noise floor", note, class_="qw-name"),
        "",
        *(tag("td", c, class_="qw-n qw-soft") for c in cells),
    ]
