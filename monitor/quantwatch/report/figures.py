"""The figures of one candidate, looked up and derived once for every report format."""

import re
from collections.abc import Iterable

from quantwatch.domain import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MODEL,
    CandidateResult,
    Measurement,
    Scope,
    is_layer,
    layer_index,
)
from quantwatch.report.numbers import MISSING, Z95, Number, statistic

Interval = tuple[float, float]
_FIRST, _LAST = -1, 1 << 30


class Figures:
    """Measurements of a candidate by metric and scope, with what is derived from them."""

    def __init__(self, candidate: CandidateResult) -> None:
        self.candidate = candidate
        self._rows = {(row.metric, row.scope): row for row in candidate.measurements}
        scopes = {row.scope for row in candidate.measurements} - {MODEL}
        ordered = sorted(scopes, key=forward_order)
        self.layers: tuple[Scope, ...] = tuple(scope for scope in ordered if is_layer(scope))
        """Whole layers in forward order."""
        self.scopes: tuple[Scope, ...] = tuple(scope for scope in ordered if not is_layer(scope))
        """Every other measured place in forward order."""

    def row(self, metric: str, scope: str = MODEL) -> Measurement | None:
        """Return the measurement of a metric at a scope, None when it wasn't measured."""
        return self._rows.get((metric, Scope(scope)))

    def number(self, metric: str, scope: str = MODEL, name: str = "mean") -> Number:
        """Return one statistic of a metric at a scope."""
        return statistic(self.row(metric, scope), name)

    @property
    def kl_metric(self) -> str:
        """The output KL that was measured: of a served candidate only a lower bound is known."""
        served = (("served_kl", MODEL) in self._rows) and ("logit_kl", MODEL) not in self._rows
        return "served_kl" if served else "logit_kl"

    @property
    def at_least(self) -> str:
        """What stands before an output KL that is a lower bound."""
        return "≥ " if self.kl_metric == "served_kl" else ""

    @property
    def bits(self) -> str:
        """Bits per weight for people, – where they aren't known."""
        variant = self.candidate.variant
        known = variant is not None and variant.bits_per_weight is not None
        return f"{variant.bits_per_weight:.2f}" if variant is not None and known else "–"

    @property
    def num_missing(self) -> int:
        """Number of positions that a server's answers are missing for."""
        row = self.row("served_kl")
        return 0 if row is None else row.n_missing

    @property
    def has_routers(self) -> bool:
        """Whether the choices of routers were compared in any layer."""
        return any(metric == "router_overlap" for metric, _ in self._rows)

    def interval(self, metric: str, scope: str = MODEL) -> Interval | None:
        """Return the 95 % interval of a mean (± 1.96 se clustered by prompt), None without a se."""
        derived = metric == "ppl_ratio"
        row = self.row("nll_difference" if derived else metric, scope)
        if row is None or row.mean is None or row.se is None:
            return None
        bounds = [Number(row.mean + sign * Z95 * row.se) for sign in (-1, 1)]
        low, high = (bound.exp().value if derived else bound.value for bound in bounds)
        return None if low is None or high is None else (low, high)

    @property
    def perplexities(self) -> tuple[Number, Number, Number]:
        """Perplexity of reference, candidate, and their ratio: e to the mean NLL (difference)."""
        names = ("nll_reference", "nll_candidate", "nll_difference")
        reference, candidate, ratio = (self.number(name).exp() for name in names)
        return reference, candidate, ratio

    @property
    def leaked_mass(self) -> Number:
        """Probability outside the shared vocabulary; exactly 0 when all ids are shared."""
        measured = self.row("leaked_mass")
        if measured is None:
            return MISSING if self.row("logit_kl") is None else Number(0.0)
        return statistic(measured)

    @property
    def num_nonfinite(self) -> int:
        """Number of non-finite values of the output KL and of the relative error at the taps."""
        counted = (self.kl_metric, "rel_error")
        rows = self.candidate.measurements
        return sum(row.num_nonfinite for row in rows if row.metric in counted)

    def worst(self, metric: str, scopes: Iterable[Scope], count: int) -> list[Scope]:
        """Return the scopes with the largest mean; non-finite ones first, unmeasured ones never."""
        keyed = [(self.number(metric, scope), scope) for scope in scopes]
        kept = [(number, scope) for number, scope in keyed if number.kind != "missing"]
        worst_first = sorted(kept, key=lambda item: _size(item[0]), reverse=True)
        return [scope for _, scope in worst_first[:count]]


def _size(number: Number) -> float:
    return float("inf") if number.value is None else number.value


def forward_order(scope: str) -> tuple[int, int, str]:
    """Return a sort key along the data: embedding, a layer's parts, the layer, norm, head."""
    index = layer_index(scope)
    if index is not None:
        part = re.sub(r"^layers\.\d+\.?", "", scope)
        return index, 1 if part else 2, part
    ends = {EMBEDDING: (_FIRST, 0), FINAL_NORM: (_LAST, 0), HEAD: (_LAST, 1)}
    return *ends.get(Scope(scope), (_LAST, 2)), scope
