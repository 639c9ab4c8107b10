"""The three ways to place a zero, and the three ways to share a scale."""

from typing import Any

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.specs import (
    Granularity,
    PerChannel,
    PerGroup,
    PerTensor,
    WeightSpec,
    Zero,
)

ZEROS: dict[str, tuple[str, Zero]] = {
    "symmetric": ("int4", "none"),
    "integer zero": ("uint4", "integer"),
    "float zero": ("uint3", "float"),
}
SHARES: dict[str, Granularity] = {
    "group": PerGroup(16),
    "row": PerChannel(),
    "tensor": PerTensor(),
}


def weight_spec(zero: str, granularity: Granularity, **changes: Any) -> WeightSpec:
    """Return the spec of a name in `ZEROS`."""
    name, kind = ZEROS[zero]
    return WeightSpec(INT_FORMATS[name], granularity, kind, **changes)
