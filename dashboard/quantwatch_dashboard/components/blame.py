"""The places that make the largest errors themselves, beside what arrives at them."""

from quantwatch_dashboard import text
from quantwatch_dashboard.components.explain import numbers
from quantwatch_dashboard.components.markup import Html, link, table, tag
from quantwatch_dashboard.logic.lines import Blamed

_MOST = 10


def blame_table(found: Blamed, run_id: str) -> Html:
    """Return one candidate's places by their own error, the largest first, each with a link."""
    rows = [
        (place, own, there)
        for place, own, there in zip(found.places, found.isolated, found.propagated, strict=True)
        if own is not None and there is not None
    ]
    # NaN leads: nothing is worse than no number.
    rows.sort(key=lambda row: (row[1] == row[1], -row[1] if row[1] == row[1] else 0.0))
    marked = found.places[found.culprit] if found.culprit is not None else None
    query = {"run": run_id, "candidate": found.name}
    own = {"Isolated": "isolated_error", "Relative": "rel_error"}
    headers = [f"Largest own errors of {found.name}", *numbers(own)]
    return table(headers, (_row(row, query, marked) for row in rows[:_MOST]), "qw-top")


def _row(row: tuple[str, float, float], query: dict[str, str], marked: str | None) -> list[object]:
    place, own, there = row
    hot = " qw-marked" if place == marked else ""
    return [
        tag("td", link(place, "run", **query, layer=place), class_=f"qw-mono qw-small{hot}"),
        *(tag("td", text.number(value), class_=f"qw-n{hot}") for value in (own, there)),
    ]
