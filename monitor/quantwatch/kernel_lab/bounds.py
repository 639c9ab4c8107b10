"""Error bounds against what is observed on real layers: are they right, and are they of any use?

For every layer and format:

- worst case: no weight and no dot product may exceed its bound. One that does is a wrong bound or a
  wrong kernel;
- expected form: a dot product's error has the deviation σ = √(Σ x²·E e²), so 99.9 % lie within
  3.29 σ. The observed 99.9 % quantile of |error| ÷ (3.29 σ) must be within a factor of 3 of 1,
  either way: a bound ten times too large says nothing;
- the predicted SQNR of the weights must be within 0.3 dB of the measured one;
- summing in float32 adds less than γ_K·Σ|x·w|.

Dot products take rows that the layer is really fed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch.kernel_lab.inputs import FedLayer
from quantwatch_kernels.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FloatFormat
from quantwatch_kernels.quantize import error_bounds as eb
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.recipe import Recipe, WeightSpec

RECIPES = (
    *("int8-tensor", "int8-channel", "int7-g128", "int6-g64", "uint5-g64"),
    *("int4-g64", "uint4-g64", "int4-channel"),
    *("int3-g64", "uint3-g64", "int2-g16", "uint2-g16"),
)
FLOATS = (FP16, BF16, FP8_E4M3, FP8_E5M2)
TIGHTNESS = 3.0
SQNR_DB = 0.3
_NORMAL_999 = 3.2905
"""99.9 % of a normal variable lie within so many deviations."""
_UNIT32 = 2.0**-24


@dataclass(frozen=True, slots=True)
class BoundRow:
    """One layer in one format. Ratios are observed ÷ bound; a worst case above 1 is violated."""

    format: str
    scope: str
    kind: str
    num_weights: int
    weight_violations: int
    weight_worst: float
    dot_violations: int
    dot_worst: float
    dot_expected: float
    """99.9 % quantile of |error| ÷ 3.29 σ."""
    sqnr_db: float
    predicted_db: float
    sum_worst: float
    """Largest float32 summation error ÷ γ_K bound."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Return in words what is violated; empty when all holds."""
        found = []
        if self.weight_violations or self.dot_violations or not self.sum_worst <= 1:
            found.append("worst case exceeded")
        if not 1 / TIGHTNESS <= self.dot_expected <= TIGHTNESS:
            found.append("expected form off by more than 3 ×")
        if not abs(self.sqnr_db - self.predicted_db) <= SQNR_DB:
            found.append("SQNR prediction off by more than 0.3 dB")
        return tuple(found)


class _Rounded(NamedTuple):
    """A weight in a format: its values, and the two bounds of each, [N, K]."""

    values: Tensor
    worst: Tensor
    square: Tensor


def check_bounds(
    layers: Iterable[FedLayer], recipes: Iterable[str], floats: Iterable[FloatFormat] = FLOATS
) -> Iterator[BoundRow]:
    """Yield one row per layer and format. Raises ValueError for weights that aren't finite."""
    specs = {name: Recipe.named(name).weights for name in recipes}
    formats = {fmt.name: fmt for fmt in floats}
    for layer in layers:
        if not bool(torch.isfinite(layer.weight).all()):
            raise ValueError(f"{layer.scope}: its weight has values that aren't finite.")
        sums = _sum_ratio(layer)
        for name, spec in specs.items():
            yield _row(layer, name, _integer(layer.weight, spec), sums)
        for name, fmt in formats.items():
            yield _row(layer, name, _float(layer.weight, fmt), sums)


def _integer(weight: Tensor, spec: WeightSpec) -> _Rounded:
    quantized = quantize_weight(weight, spec)
    worst = eb.worst_case(weight, quantized)
    return _Rounded(quantized.values, worst, eb.expected_square(weight, quantized))


def _float(weight: Tensor, fmt: FloatFormat) -> _Rounded:
    values = weight.to(fmt.dtype).float()
    return _Rounded(values, eb.float_worst_case(weight, fmt), eb.float_expected_square(weight, fmt))


def _row(layer: FedLayer, name: str, rounded: _Rounded, sum_worst: float) -> BoundRow:
    error = rounded.values.double() - layer.weight.double()
    ratio = _ratio(error.abs(), rounded.worst)
    inputs = layer.inputs.double()
    dot = (inputs @ error.T).abs()
    # The two products are summed in float64 in another order each.
    slack = eb.accumulation_worst_case(inputs, error, 2.0**-53)
    dot_ratio = _ratio((dot - slack).clamp_min(0), eb.dot_worst_case(inputs, rounded.worst))
    tight = _ratio(dot, _NORMAL_999 * eb.dot_expected(inputs, rounded.square))
    return BoundRow(
        format=name,
        scope=layer.scope,
        kind=layer.kind,
        num_weights=error.numel(),
        weight_violations=int((~(ratio <= 1)).sum()),
        weight_worst=ratio.max().item(),
        dot_violations=int((~(dot_ratio <= 1)).sum()),
        dot_worst=dot_ratio.max().item(),
        dot_expected=torch.quantile(tight.flatten(), 0.999).item(),
        sqnr_db=eb.measured_sqnr_db(layer.weight, rounded.values),
        predicted_db=eb.predicted_sqnr_db(layer.weight, rounded.square),
        sum_worst=sum_worst,
    )


def _ratio(observed: Tensor, bound: Tensor) -> Tensor:
    """Return observed ÷ bound, 0 where nothing was observed."""
    return torch.where(observed == 0, 0.0, observed / bound)


def _sum_ratio(layer: FedLayer) -> float:
    computed = torch.nn.functional.linear(layer.inputs, layer.weight).double()
    exact = layer.inputs.double() @ layer.weight.double().T
    bound = eb.accumulation_worst_case(layer.inputs, layer.weight, _UNIT32)
    return _ratio((computed - exact).abs(), bound).max().item()
