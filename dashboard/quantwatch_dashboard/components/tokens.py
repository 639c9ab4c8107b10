"""A prompt as text colored by its output KL, and both models' first choices after one token."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quantwatch_dashboard import text
from quantwatch_dashboard.components.explain import explained
from quantwatch_dashboard.components.markup import Html, join, link, numbers, table, tag
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.logic.summaries import WorstToken
from quantwatch_dashboard.logic.toplogits import TopRow, top_rows

_AROUND = 300
_DECADES = 2.0
"""A token whose KL is this many decades below the prompt's largest has no color any more."""


def prompt_text(grid: TokenGrid, at: int) -> Html:
    """Return the prompt's tokens around column `at`, redder where the output KL is larger."""
    first, last = max(0, at - _AROUND), min(len(grid.places), at + _AROUND)
    finite = grid.values[0][np.isfinite(grid.values[0]) & ~grid.missing[0]]
    largest = float(finite.max(initial=0.0))
    spans = [_span(grid, j, largest, chosen=j == at) for j in range(first, last)]
    before = [tag("b", f"… {first} tokens before … ")] if first else []
    rest = len(grid.places) - last
    after = [tag("b", f" … {rest} tokens after …")] if rest else []
    return tag("div", *before, *spans, *after, class_="qw-prompt")


def _span(grid: TokenGrid, j: int, largest: float, *, chosen: bool) -> Html:
    value, missing = float(grid.values[0, j]), bool(grid.missing[0, j])
    place = grid.places[j]
    bad = not missing and not math.isfinite(value)
    shown = text.NOT_MEASURED if missing else f"{text.number(value)} nats"
    return tag(
        "span",
        _readable(place),
        class_=" ".join(name for name, on in (("qw-at", chosen), ("qw-not-finite", bad)) if on)
        or None,
        style=f"--heat: {0 if missing else _heat(value, largest):.0f}%",
        title=f"token {place.position} “{place.label()}”: output KL {shown}",
    )


def _readable(place: TokenPlace) -> Html:
    """Return a token as text, its end of line and its emptiness visible: they have errors too."""
    if place.piece is None:
        return join([f"[{place.label()}] "])
    if not place.piece:
        return tag("i", place.label())
    first, *rest = text.readable(place.piece).split("\n")
    return join([first, *(part for line in rest for part in (tag("i", "↵"), "\n", line))])


def _heat(value: float, largest: float) -> float:
    if not math.isfinite(value) or value <= 0 or largest <= 0:
        return 0.0
    return 100 * max(0.0, 1 + math.log10(value / largest) / _DECADES)


_TOP_HEADERS = (
    ("logit", "in the reference"),
    ("probability ≤", "among the reference's tokens of this table: the whole vocabulary has more"),
    ("other logit", "of the reference's token in the candidate"),
    ("difference", "candidate − reference, in logits"),
    ("rank", "in the candidate"),
)
_OWN_HEADERS = (
    ("logit", "in the candidate"),
    ("probability ≤", "among the candidate's tokens of this table: the whole vocabulary has more"),
    ("rank", "in the reference"),
)


def top_tables(top: NDArray[np.float64], words: Sequence[str]) -> Html:
    """Return the top tokens of both models at one position, [5, K], best first, side by side.

    `words` holds the text of each token id; ids past its end are shown as numbers.
    """
    own, other = (
        numbers(*(explained(name, why) for name, why in names))
        for names in (_TOP_HEADERS, _OWN_HEADERS)
    )
    headers = ["#", "Reference's choice", *own, "Candidate's choice", *other]
    return table(headers, (_top_row(row, words) for row in top_rows(top)), "qw-top qw-pair")


def _top_row(row: TopRow, words: Sequence[str]) -> list[object]:
    same = row.reference_id == row.candidate_id
    return [
        str(row.rank),
        _token_cell(row.reference_id, words, same=True),
        _number(row.reference_logit),
        _share(row.reference_share),
        _number(row.candidate_logit_at_reference),
        tag("td", text.signed(row.difference), class_="qw-n"),
        _moved(row.rank, row.rank_in_candidate),
        _token_cell(row.candidate_id, words, same=same),
        _number(row.candidate_logit),
        _share(row.candidate_share),
        _moved(row.rank, row.rank_in_reference),
    ]


def _token_cell(number: int | None, words: Sequence[str], *, same: bool) -> Html:
    if number is None:
        return tag("td", text.NONE)
    piece = words[number] if 0 <= number < len(words) else None
    color = "" if same else " qw-hot"
    shown = tag("span", text.token(piece, number, 28), class_=f"qw-mono{color}")
    beside = Html("") if piece is None else tag("span", f"id {number}", class_="qw-sub")
    return tag("td", shown, beside, class_="qw-text")


def _moved(rank: int, other: int | None) -> Html:
    """Return the rank in the other model, and by how many places that is up or down."""
    if other is None:
        return tag("td", "not listed", class_="qw-n qw-soft")
    steps = rank - other
    arrow = "" if steps == 0 else f" {'▲' if steps > 0 else '▼'}{abs(steps)}"
    return tag("td", f"{other}{arrow}", class_="qw-n" if steps == 0 else "qw-n qw-moved")


def _number(value: float) -> Html:
    return tag("td", text.number(value, 4), class_="qw-n")


def _share(value: float) -> Html:
    return tag("td", text.percent(value) if math.isfinite(value) else text.NONE, class_="qw-n")


def top_caption(grid: TokenGrid, at: int) -> Html:
    """Say at which token the table is, how the prompt goes on, and what its colors mean."""
    place = grid.places[at]
    after = f"After token {place.position} “{place.label(28)}”. "
    following = grid.places[at + 1 : at + 2]
    goes_on = f"The prompt goes on with “{following[0].label(28)}”. " if following else ""
    red = tag("span", "Red", class_="qw-hot")
    return tag("p", after, goes_on, red, ": another choice than the reference's at that rank. ",
               "A share is of the tokens that are kept of that model, not of all: the probability"
               " is at most that.", class_="qw-soft qw-small")  # fmt: skip


def worst_table(tokens: Sequence[WorstToken], run_id: str, candidate: str) -> Html:
    """Return the tokens with the largest output KL, each a link to its prompt and token."""
    headers = ["Token", "Prompt", "At", *numbers("Output KL, nats")]
    rows = [_worst_row(token, run=run_id, candidate=candidate) for token in tokens]
    return table(headers, rows, "qw-top") if rows else tag("p", "No token values are stored.")


def _worst_row(token: WorstToken, **query: str) -> list[object]:
    prompt, position = str(token.place.prompt), str(token.place.position)
    there = link(token.place.label(24), "run", **query, prompt=prompt, token=position)
    return [
        tag("td", there, class_="qw-mono"),
        prompt,
        position,
        tag("td", text.number(token.value), class_="qw-n"),
    ]
