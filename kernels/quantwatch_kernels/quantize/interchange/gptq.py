"""GPTQ checkpoints: `qweight`, `qzeros`, `scales`, `g_idx`; version 1 stores zero points less 1.

w[n, k] = (q − z) · s with q [N, K], z and s per group g_idx[k]. `qweight` int32 [K·b/32, N] packs
down the inputs, `qzeros` int32 [G, N·b/32] along the outputs, lowest bits first; `scales` [G, N].

Version 1 stores (z − 1) mod 2^b, version 2 stores z, and nothing in the tensors says which: read as
the other one every weight is off by a step (bug log 9). z = 0 wraps to 15 in version 1; adding 1
without the mask made it 16 in some readers.

With activation order g_idx isn't sorted. Our groups are neighbours, so the columns are sorted by
group and the order is handed back; `values` are in the order of the inputs again.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.interchange.words import (
    float16_exactly,
    granularity_of,
    pack_words,
    unpack_words,
    unsigned,
)
from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.quantize.recipe import PerGroup, WeightSpec

__all__ = ["GptqTensors", "GptqWeight", "from_gptq", "to_gptq"]

Version = Literal[1, 2]
_BITS = (2, 4, 8)


class GptqTensors(NamedTuple):
    """One layer as it is stored; see the module's docstring."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """A weight whose columns are sorted by group."""

    weight: QuantizedWeight
    order: Tensor | None
    """Column j of `weight` multiplies input order[j]; None: they are in order."""

    @property
    def values(self) -> Tensor:
        """The weights [N, K], float32, in the order of the inputs."""
        values = self.weight.values
        return values if self.order is None else values[:, self.order.argsort()]


def to_gptq(weight: QuantizedWeight, version: Version) -> GptqTensors:
    """Return a weight as a GPTQ checkpoint stores it; float16 scales.

    Raises ValueError for other than 2, 4 or 8 bits, float zeros, sizes that don't fill words, and
    scales that float16 can't hold.
    """
    _check(version)
    codes, zeros = unsigned(weight, _BITS, "GPTQ")
    bits, columns = weight.spec.format.bits, codes.shape[1]
    grouped = isinstance(weight.spec.granularity, PerGroup)
    groups = slice(None) if grouped else slice(1)
    scales = float16_exactly(weight.qparams.scales[:, groups], "GPTQ")
    stored = (zeros[:, groups] - int(version == 1)) & ((1 << bits) - 1)
    return GptqTensors(
        pack_words(codes, bits).T.contiguous(),
        pack_words(stored.T, bits),
        scales.T.contiguous(),
        (torch.arange(columns) // weight.spec.granularity.group_size(columns)).to(torch.int32),
    )


def from_gptq(tensors: GptqTensors, bits: int, version: Version) -> GptqWeight:
    """Read a layer of a GPTQ checkpoint.

    Raises ValueError for shapes, widths, groups or scales that are none of this format's.
    """
    _check(version)
    if bits not in _BITS:
        raise ValueError(f"GPTQ here holds codes of 2, 4 or 8 bits; not {bits}.")
    codes = unpack_words(tensors.qweight.T.contiguous(), bits)
    zeros = unpack_words(tensors.qzeros, bits).T
    scales = tensors.scales.T.contiguous()
    if zeros.shape != scales.shape or len(zeros) != len(codes):
        raise ValueError(
            f"codes {list(codes.shape)}, zeros {list(zeros.shape)} and scales "
            f"{list(scales.shape)} don't belong to one weight [N, K] with groups [N, G]."
        )
    if bool((scales < 0).any()):
        raise ValueError(f"GPTQ scales are positive; the smallest is {float(scales.min())}.")
    zeros = (zeros + int(version == 1)) & ((1 << bits) - 1)
    order, size = _order(tensors.g_idx, scales.shape[1])
    spec = WeightSpec(
        INT_FORMATS[f"uint{bits}"],
        granularity_of(codes.shape[1], scales.shape[1], size),
        "integer",
        scale_dtype=scales.dtype,
    )
    codes = codes if order is None else codes[:, order]
    # A dead group has scale 0: exact zeros, with a scale that can be divided by (bug log 5).
    dead = scales == 0
    at_zero = zeros.repeat_interleave(size, 1)[:, : codes.shape[1]]
    codes = torch.where(dead.repeat_interleave(size, 1)[:, : codes.shape[1]], at_zero, codes)
    return GptqWeight(
        QuantizedWeight(codes, QParams(scales.masked_fill(dead, 1), zeros), spec), order
    )


def _check(version: int) -> None:
    if version not in (1, 2):
        raise ValueError(f"GPTQ checkpoints have version 1 (zeros less 1) or 2; not {version!r}.")


def _order(g_idx: Tensor, num_groups: int) -> tuple[Tensor | None, int]:
    """Return the inputs sorted by group, None if they are, and the size of a group."""
    counts = torch.bincount(g_idx.long(), minlength=num_groups)
    size = int(counts[0])
    # All groups are full but the last one, which may be short.
    if len(counts) != num_groups or bool((counts[:-1] != size).any()) or counts[-1] > size:
        raise ValueError(
            f"{num_groups} groups of equal size are wanted; g_idx has {counts.tolist()}."
        )
    order = g_idx.argsort(stable=True)
    return (None if torch.equal(order, torch.arange(len(order))) else order), size
