"""AWQ checkpoints (GEMM): `qweight`, `qzeros`, `scales`, 4 bits, interleaved along the outputs.

w[n, k] = (q − z) · s. `qweight` int32 [K, N/8]: bits 4i … 4i + 3 of a word are output
8·c + order[i], order 0 2 4 6 1 3 5 7; `qzeros` int32 [G, N/8] the same; `scales` [G, N]. Zero
points are stored as they are, unlike GPTQ's version 1.
"""

from typing import NamedTuple

from torch import Tensor

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.interchange.words import (
    INTERLEAVED,
    check_whole_groups,
    float16_exactly,
    granularity_of,
    pack_words,
    unpack_words,
    unsigned,
)
from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.quantize.recipe import PerGroup, WeightSpec

__all__ = ["AwqTensors", "from_awq", "to_awq"]


class AwqTensors(NamedTuple):
    """One layer as it is stored; see the module's docstring."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor


def to_awq(weight: QuantizedWeight) -> AwqTensors:
    """Return a weight as an AWQ checkpoint stores it; float16 scales.

    Raises ValueError for other than 4 bits, float zeros, a short last group, outputs that aren't a
    multiple of 8, and scales that float16 can't hold.
    """
    codes, zeros = unsigned(weight, (4,), "AWQ")
    check_whole_groups(weight, "AWQ")
    groups = slice(None) if isinstance(weight.spec.granularity, PerGroup) else slice(1)
    scales = float16_exactly(weight.qparams.scales[:, groups], "AWQ")
    return AwqTensors(
        pack_words(codes.T, 4, INTERLEAVED),
        pack_words(zeros[:, groups].T, 4, INTERLEAVED),
        scales.T.contiguous(),
    )


def from_awq(tensors: AwqTensors) -> QuantizedWeight:
    """Read a layer of an AWQ checkpoint; raises ValueError for shapes that don't fit together."""
    codes = unpack_words(tensors.qweight, 4, INTERLEAVED).T.contiguous()
    zeros = unpack_words(tensors.qzeros, 4, INTERLEAVED).T.contiguous()
    scales = tensors.scales.T.contiguous()
    columns, num_groups = codes.shape[1], scales.shape[1]
    if zeros.shape != scales.shape or len(zeros) != len(codes) or columns % num_groups:
        raise ValueError(
            f"codes {list(codes.shape)}, zeros {list(zeros.shape)} and scales "
            f"{list(scales.shape)} don't belong to one weight [N, K] with groups [N, G]."
        )
    granularity = granularity_of(columns, num_groups, columns // num_groups)
    spec = WeightSpec(INT_FORMATS["uint4"], granularity, "integer", scale_dtype=scales.dtype)
    return QuantizedWeight(codes, QParams(scales, zeros), spec)
