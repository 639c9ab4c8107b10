"""The article's layer table: one row per layer of one candidate. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantwatch.domain import CandidateResult
from quantwatch.metrics.registry import ROUTER_METRICS
from quantwatch.report.figures import Figures
from quantwatch_dashboard import text
from quantwatch_dashboard.logic.figures import figures_of


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
    routers: Mapping[str, float | None] = field(default_factory=dict)
    """By metric, those of `ROUTER_METRICS`."""

    def value(self, column: str) -> float | None:
        """Return a column's figure: one of the fields above, or a metric of routers."""
        if column in ROUTER_METRICS:
            return self.routers.get(column)
        found: float | None = getattr(self, column)
        return found


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
        {metric: number(metric) for metric in ROUTER_METRICS},
    )
