"""Per-layer KL from products in bfloat16, summed in float32: half the lens's time, less precise.

    z = b(h) b(W)     z' = z + b(h' - h) b(W)     b rounds to bfloat16

Rounding both models' states one by one would put an error into z' − z that is as large as what a
good candidate differs by. Here the models share the error of z, which moves a KL in proportion to
itself only, and z' − z is rounded relative to its own size. What a KL is off by doesn't depend on
how small it is: on SmolLM2-135M, half a percent for a token in the median (docs/performance.md).

A weight whose values are no bfloat16 numbers is rounded, too; that error is shared as well. Rows
with logits that aren't finite are read in float32. n rows, H hidden width, V ids.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.lens_bfloat16_native import (
    PAIRS,
    fused_sums_bfloat16,
    why_not_native_bfloat16,
)
from quantwatch_kernels.compare.lens_native import COLUMNS
from quantwatch_kernels.compare.lens_rows import (
    LensStatistics,
    Pair,
    deviations,
    in_pieces,
    whole_rows,
)
from quantwatch_kernels.compare.readout import Readout, why_not_a_product, why_not_pieces
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import Op

__all__ = ["LENS_BFLOAT16", "why_not_bfloat16"]

LENS_BFLOAT16: Op[[Tensor, Tensor, Readout, int], LensStatistics] = Op("lens_bfloat16")


def why_not_bfloat16(head: Callable[[Tensor], Tensor]) -> str | None:
    """Say why a head has no products in bfloat16 with this error, None if it has."""
    if reason := why_not_a_product(head):
        return reason
    dtype = cast(nn.Linear, head).weight.dtype
    return None if dtype == torch.float32 else f"the head is {dtype}, not float32"


def _why_not_native(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> str | None:  # noqa: ARG001
    head = readout.head
    return why_not_bfloat16(head) or why_not_pieces(head) or why_not_native_bfloat16()


@LENS_BFLOAT16.register("native", _why_not_native)
def _native(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    sums = partial(fused_sums_bfloat16, finish=readout.finish)
    return in_pieces((h_ref, h_cand), readout, PAIRS, sums, _whole(readout, chunk))


@LENS_BFLOAT16.register("aten")
def _aten(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    return _whole(readout, chunk)((h_ref, h_cand))


def _whole(readout: Readout, chunk: int) -> partial[LensStatistics]:
    logits = partial(_logits, readout)
    return partial(whole_rows, chunk=chunk, name=LENS_BFLOAT16.name, logits=logits)


def _logits(readout: Readout, pair: Pair) -> Pair:
    """Read rows [n, H] off as float32 logits [n, V], by float32 products of rounded factors."""
    weight = cast(nn.Linear, readout.head).weight[: readout.width]
    h, other = readout.normed(pair[0]), readout.normed(pair[1])
    rows = torch.cat([_rounded(h), _rounded(other - h)])
    out = workspace.take("rounded logits", len(rows), len(weight), rows.device)
    for first in range(0, len(weight), COLUMNS):
        ids = slice(first, first + COLUMNS)
        out[:, ids] = torch.mm(rows, _rounded(weight[ids]).t())
    z, z_other = out[: len(h)], out[len(h) :]
    z_other += z
    return _finite((readout.finish(z), readout.finish(z_other)), (h, other), readout)


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _finite(logits: Pair, normed: Pair, readout: Readout) -> Pair:
    """Return the logits; rows in which one isn't finite are read anew without rounding."""
    odd = torch.stack([~torch.isfinite(z).all(-1) for z in logits]).any(0).nonzero().flatten()
    if len(odd):
        for z, h in zip(logits, normed, strict=True):
            z[odd] = readout.head_logits(h[odd]).to(z.dtype)
    return logits


@LENS_BFLOAT16.register("reference")
def _reference(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:  # noqa: ARG001
    weight = _rounded(cast(nn.Linear, readout.head).weight[: readout.width]).double()
    h, other = readout.normed(h_ref), readout.normed(h_cand)
    z = _rounded(h).double() @ weight.t()
    z_other = z + _rounded(other - h).double() @ weight.t()
    z, z_other = _finite((_finished(z, readout), _finished(z_other, readout)), (h, other), readout)
    ids = z.sort(dim=-1, descending=True, stable=True)[1][:, :5]
    return LensStatistics(compare_exactly(z, z_other).kl, *deviations(z, z_other, ids))


def _finished(products: Tensor, readout: Readout) -> Tensor:
    """Do in float64 what `Readout.finish` does in float32."""
    logits = products * readout.scale
    cap = readout.softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap
