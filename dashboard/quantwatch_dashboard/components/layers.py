"""The article's layer table: numbers as everywhere else, the place that broke marked."""

import math
from collections.abc import Sequence

from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, table, tag
from quantwatch_dashboard.series import LayerRow

COLUMNS = {
    "mean_kl": "Mean KL, nats",
    "p99_kl": "p99",
    "max_kl": "max",
    "top3_logit_deviation": "Mean top-3 logit deviation",
    "isolated_error": "Isolated error",
    "rel_error": "Relative error",
}


def worst_first(rows: Sequence[LayerRow], column: str) -> list[LayerRow]:
    """Return the rows by one of `COLUMNS`: not finite, then the largest, not measured at the end.

    Any other column keeps their order.
    """
    if column not in COLUMNS:
        return list(rows)
    return sorted(rows, key=lambda row: _rank(getattr(row, column)))


def _rank(value: float | None) -> float:
    if value is None:
        return math.inf
    return -value if math.isfinite(value) else -math.inf


def layer_table(rows: Sequence[LayerRow], marked: str | None) -> Html:
    """Return one row per layer in the given order; `marked` is the layer to be seen first."""
    counted = any(row.num_nonfinite for row in rows)
    names = [*COLUMNS.values(), *(["Not finite"] if counted else [])]
    headers = ["Layer", *(tag("th", name, scope="col", class_="n") for name in names)]
    return table(headers, (_row(row, marked, counted) for row in rows), "qw-top qw-tall")


def _row(row: LayerRow, marked: str | None, counted: bool) -> list[object]:
    hot = " qw-marked" if row.layer == marked else ""
    numbers = [text.number(getattr(row, column)) for column in COLUMNS]
    cells = [*numbers, *([f"{row.num_nonfinite:,}"] if counted else [])]
    return [
        tag("td", row.layer, class_=f"qw-mono qw-small{hot}"),
        *(tag("td", cell, class_=f"n{hot}") for cell in cells),
    ]
