"""Two candidates side by side: who they are, the numbers of both, what else differs."""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, tzinfo
from itertools import groupby

from quantwatch.baselines.comparable import Mismatch
from quantwatch.metrics.registry import METRICS
from quantwatch_dashboard import text
from quantwatch_dashboard.components.explain import term
from quantwatch_dashboard.components.markup import Html, link, numbers, table, tag
from quantwatch_dashboard.components.verdict import candidate_badge
from quantwatch_dashboard.components.words import moment, swatch
from quantwatch_dashboard.logic import naming
from quantwatch_dashboard.logic.cells import Kind, value_text
from quantwatch_dashboard.logic.contrast import Finding, Row, Side, finding
from quantwatch_dashboard.logic.figures import bits
from quantwatch_dashboard.logic.grid import TokenGrid
from quantwatch_dashboard.logic.identities import Fact

NOT_COMPARABLE = (
    "A difference would be one of what is measured, not of the candidates. Both are shown below, "
    "without differences."
)
PAIRED = (
    "Paired by prompt: the same prompts and tokens in both. Marks allow 5 % false discoveries "
    "among the output and all layers together."
)
_TONES = {"worse": "qw-worse", "better": "qw-better", "same": "qw-soft", "unknown": "qw-soft"}
_ICONS = {"worse": "▲", "better": "▼", "same": "≈", "unknown": "–"}
_GROUPS = {
    "measured": "What was measured", "candidate": "The candidate", "reference": "The reference",
    "environment": "The environment",
}  # fmt: skip


def side_card(letter: str, side: Side, now: datetime, zone: tzinfo) -> Html:
    """Return who one side is: candidate, verdict, check, when, how large."""
    result, variant = side.result, side.candidate.variant
    size = "" if variant is None else (
        f"{variant.execution} · {bits(variant)} bits per weight · "
        f"{text.size(variant.size_bytes)}"
    )  # fmt: skip
    run = link("open run →", "run", run=result.run_id, candidate=side.candidate.name)
    return tag(
        "div",
        tag("div", name_of(letter), tag("b", side.candidate.name),
            candidate_badge(side.candidate.verdict), class_="qw-wrap"),
        tag("div", f"{result.check} · ", moment(result.started_at, now, zone), " · ", run,
            class_="qw-soft qw-small qw-wrap"),
        tag("div", size, class_="qw-soft qw-small"),
        class_="qw-tile",
    )  # fmt: skip


def name_of(letter: str) -> Html:
    """Return the letter of a side with its color in the charts."""
    return tag("span", swatch("ab".index(letter.lower())), f"{letter.upper()} ", class_="qw-soft")


def reasons(found: Sequence[Mismatch]) -> Html:
    """Say why no difference is shown."""
    rows = [
        (each.name, tag("td", each.before or text.NONE, class_="qw-mono"),
         tag("td", each.now or text.NONE, class_="qw-mono"), each.meaning)
        for each in found
    ]  # fmt: skip
    return table(("", "A", "B", "What that means"), rows)


def headline_table(rows: Iterable[Row]) -> Html:
    """Return both values of every number, the difference with its interval, and its mark."""
    sides = (name_of(letter) for letter in "ab")
    headers = ["Number", *numbers(*sides, "B − A", "95 % interval"), "More than chance?"]
    labels = ("A", "B", "B − A", "95 % interval")
    return table(headers, map(_headline, rows), "qw-versus", cards=labels)


def _headline(row: Row) -> Sequence[object]:
    found = finding(row)
    tone = _TONES[found.tone]
    name = (
        naming.title(row.metric)
        if row.statistic == "mean"
        else f"{naming.title(row.metric)}, {row.statistic}"
    )
    difference = row.difference
    return [
        tag("td", _term(row, name), tag("span", _unit(row.metric), class_="qw-sub")),
        *(tag("td", _number(row, value), class_="qw-n") for value in (row.a, row.b)),
        tag("td", text.NONE if difference is None else text.signed(difference, 3), _factor(row),
            class_=f"qw-n {tone}"),
        tag("td", interval(row), class_="qw-n"),
        tag("td", icon_of(found), " ", found.words, _rate(row), class_=f"{tone} qw-text"),
    ]  # fmt: skip


def icon_of(found: Finding) -> Html:
    """Return the sign of a mark, which is never a color alone."""
    return tag("span", _ICONS[found.tone], aria_hidden="true")


def interval(row: Row) -> str:
    """Return the interval of a difference; of too few prompts it is the range of theirs."""
    if row.test is None or not row.test.num_prompts or not math.isfinite(row.difference or 0.0):
        return text.NONE
    if row.test.low == row.test.high == 0:
        return "0"
    bounds = f"{text.signed(row.test.low, 3)} … {text.signed(row.test.high, 3)}"
    return bounds if row.test.is_enough else f"range {bounds}"


def _term(row: Row, name: str) -> Html:
    return term("nll_difference" if row.metric == naming.PPL_RATIO else row.metric, name)


def _unit(metric: str) -> str:
    unit = "" if metric == naming.PPL_RATIO else METRICS[metric].unit
    better = "higher" if metric in METRICS and METRICS[metric].direction == "higher" else "lower"
    return f"{'' if unit in ('', '1') else f'{unit}, '}{better} is better"


def _number(row: Row, value: float | None) -> str:
    if row.metric == "top1_agreement":
        return text.percent(value)
    return text.number(value, 5 if row.metric == naming.PPL_RATIO else 3)


def _factor(row: Row) -> Html:
    """Return how many times as large B is, where that says more than the difference."""
    shown = (
        row.metric in ("logit_kl", "served_kl")
        and row.difference
        and not (row.test and row.test.lost)
    )
    if not shown or not row.a or not row.b or not 0 < row.b / row.a < math.inf:
        return Html("")
    return tag("span", f"× {row.b / row.a:.3g}", class_="qw-sub")


def _rate(row: Row) -> Html:
    if row.test is None or row.test.q is None:
        return Html("")
    said = f"q = {text.number(row.test.q, 2)}, {text.plural(row.test.num_prompts, 'prompt')}"
    return tag("span", said, class_="qw-sub")


def fact_table(found: Iterable[Fact]) -> Html:
    """Return what both sides say of themselves, group by group; what differs stands out."""
    rows: list[Sequence[object]] = []
    for group, facts in groupby(found, key=lambda fact: fact.group):
        rows.append([tag("td", _GROUPS[group], colspan="3", class_="qw-group")])
        rows += [_fact(fact) for fact in facts]
    return table(("", *(name_of(letter) for letter in "ab")), rows, "qw-facts-table")


def _fact(fact: Fact) -> Sequence[object]:
    class_ = "qw-mono qw-small words" + (" qw-changed" if fact.differs else "")
    return [
        tag("td", fact.name, class_="qw-name"),
        *(tag("td", text.clip(value, 200), class_=class_) for value in (fact.a, fact.b)),
    ]


def worst_place(grid: TokenGrid, kind: Kind, sides: Sequence[Side]) -> Html:
    """Return where a difference is largest, with links to that token in both runs."""
    worst = grid.worst_cell()
    if worst is None:
        return Html("")
    place, scope = grid.places[worst[1]], grid.scopes[worst[0]]
    value = value_text(float(grid.values[worst]), kind)
    where = {"prompt": str(place.prompt), "token": str(place.position), "layer": scope}
    links = [
        link(f" {letter} →", "run", run=side.key[0], candidate=side.key[1], **where)
        for letter, side in zip("AB", sides, strict=True)
    ]
    said = f" Worst: {value} at {scope}, token {place.position} “{place.label()}”; open it in"
    return tag("span", said, *links)
