"""The article's layer table: numbers as everywhere else, the place that broke marked."""

import math
from collections.abc import Sequence

from quantwatch.metrics.registry import METRICS, ROUTER_METRICS
from quantwatch_dashboard import text
from quantwatch_dashboard.components import explain
from quantwatch_dashboard.components.markup import Html, numbers, table, tag
from quantwatch_dashboard.logic import naming
from quantwatch_dashboard.logic.layer_rows import LayerRow

COLUMNS = {
    "mean_kl": "Mean KL, nats",
    "p99_kl": "p99",
    "max_kl": "max",
    "top3_logit_deviation": "Mean top-3 logit deviation",
    "isolated_error": "Isolated error",
    "rel_error": "Relative error",
}
_METRICS = {
    "mean_kl": "lens_kl",
    "p99_kl": "lens_kl",
    "max_kl": "lens_kl",
    "top3_logit_deviation": "topk_logit_deviation_k3",
    "isolated_error": "isolated_error",
    "rel_error": "rel_error",
} | {metric: metric for metric in ROUTER_METRICS}


def columns(rows: Sequence[LayerRow]) -> dict[str, str]:
    """Return the columns and their names: those of routers only where any choice was compared."""
    routed = any(row.value("router_overlap") is not None for row in rows)
    return COLUMNS | ({metric: naming.title(metric) for metric in ROUTER_METRICS} if routed else {})


def worst_first(rows: Sequence[LayerRow], column: str) -> list[LayerRow]:
    """Return the rows by a column: not finite, then the worst, not measured at the end.

    Any name that is no column keeps their order.
    """
    if column not in _METRICS:
        return list(rows)
    spec = METRICS[_METRICS[column]]
    sign = 1 if spec.direction == "higher" else -1
    return sorted(rows, key=lambda row: _rank(row.value(column), sign))


def _rank(value: float | None, sign: int) -> float:
    if value is None:
        return math.inf
    return sign * value if math.isfinite(value) else -math.inf


def layer_table(rows: Sequence[LayerRow], marked: str | None, chosen: str | None = None) -> Html:
    """Return one row per layer in the given order.

    `marked` is the layer that broke, `chosen` the one that the reader chose.
    """
    counted = any(row.num_nonfinite for row in rows)
    shown = columns(rows)
    named = {name: _METRICS[column] for column, name in shown.items()}
    headers = ["Layer", *explain.numbers(named), *(numbers("Values not finite") if counted else ())]
    return table(
        headers, (_row(row, (marked, chosen), [*shown], counted) for row in rows), "qw-top qw-tall"
    )


def _row(
    row: LayerRow, special: tuple[str | None, str | None], shown: Sequence[str], counted: bool
) -> list[object]:
    marked, chosen = special
    hot = " qw-marked" if row.layer == marked else " qw-chosen" if row.layer == chosen else ""
    numbers = [text.number(row.value(column)) for column in shown]
    cells = [*numbers, *([f"{row.num_nonfinite:,}"] if counted else [])]
    return [
        tag("td", row.layer, class_=f"qw-mono qw-small{hot}"),
        *(tag("td", cell, class_=f"qw-n{hot}") for cell in cells),
    ]
