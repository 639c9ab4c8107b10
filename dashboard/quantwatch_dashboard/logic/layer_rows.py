"""The article's layer table: one row per layer of one candidate. Pure."""

from dataclasses import dataclass

from quantwatch.domain import CandidateResult
from quantwatch.report.figures import Figures
from quantwatch_dashboard import text
from quantwatch_dashboard.logic.figures import figures_of

ROUTER = (
    "router_overlap", "router_weight_l1", "router_flips", "router_load_tv", "router_load_max",
)  # fmt: skip
"""Measured in layers with experts only."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """The article's layer table, one row: means unless the name says otherwise."""

    layer: str
    mean_kl: float | None
    p99_kl: float | None
    max_kl: float | None
    top3_logit_deviation: float | None
    isolated_error: float | None
    rel_error: float | None
    num_nonfinite: int
    router_overlap: float | None = None
    router_weight_l1: float | None = None
    router_flips: float | None = None
    router_load_tv: float | None = None
    router_load_max: float | None = None


def layer_rows(candidate: CandidateResult) -> list[LayerRow]:
    """Return one row per layer of a candidate."""
    figures = figures_of(candidate)
    return [_layer_row(figures, layer) for layer in figures.layers]


def _layer_row(figures: Figures, layer: str) -> LayerRow:
    def number(metric: str, name: str = "mean") -> float | None:
        return text.plain(figures.number(metric, layer, name))

    counted = ("lens_kl", "rel_error", "isolated_error", "router_overlap")
    rows = [figures.row(metric, layer) for metric in counted]
    return LayerRow(
        layer,
        number("lens_kl"),
        number("lens_kl", "p99"),
        number("lens_kl", "max"),
        number("topk_logit_deviation_k3"),
        number("isolated_error"),
        number("rel_error"),
        sum(row.num_nonfinite for row in rows if row is not None),
        **{metric: number(metric) for metric in ROUTER},
    )
