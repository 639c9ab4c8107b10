"""Per-layer KL from products of 16-bit factors, in two thirds of the lens's time or less.

    z = b(h) b(W)     z' = z + b(h' - h) b(W)     b rounds to bfloat16 or to int16 (rounding.py)

Rounding both models' states one by one would put an error into z' − z that is as large as what a
good candidate differs by. Here the models share the error of z, which moves a KL in proportion to
itself only, and z' − z is rounded relative to its own size. What a KL is off by doesn't depend on
how small it is: on SmolLM2-135M, half a percent for a token in the median with bfloat16 and a
seventieth of a percent with int16 (docs/performance.md).

A weight whose values are none of b's is rounded, too; that error is shared as well. Rows with
logits that aren't finite are read in float32. n rows, H hidden width, V ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.lens_native import COLUMNS
from quantwatch_kernels.compare.lens_rows import (
    LensStatistics,
    Pair,
    deviations,
    in_pieces,
    whole_rows,
)
from quantwatch_kernels.compare.lens_words_native import (
    PAIRS,
    fused_word_sums,
    why_not_words,
)
from quantwatch_kernels.compare.readout import Readout, why_not_float32, why_not_pieces
from quantwatch_kernels.compare.rounding import ROUNDINGS, Rounded
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import Op

__all__ = ["LENS_BFLOAT16", "LENS_INT16", "LENS_ROUNDED"]


@dataclass(frozen=True, slots=True)
class _Ways:
    """The ways to compute with one kind of factors."""

    factors: Rounded

    @property
    def name(self) -> str:
        return f"lens_{self.factors}"

    def why_not_native(
        self, h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int
    ) -> str | None:
        del h_cand, chunk
        head = readout.head
        return why_not_float32(head) or why_not_pieces(h_ref, head) or why_not_words(self.factors)

    def native(self, h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
        sums = partial(fused_word_sums, readout=readout, factors=self.factors)

        def again(pair: Pair) -> LensStatistics:
            return self.aten(*pair, readout, chunk)

        return in_pieces((h_ref, h_cand), readout, PAIRS, sums, again)

    def aten(self, h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
        logits = partial(self._logits, readout)
        return whole_rows((h_ref, h_cand), chunk, self.name, logits)

    def reference(
        self, h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int
    ) -> LensStatistics:
        del chunk
        rounded = ROUNDINGS[self.factors]
        weight = rounded(_weight(readout)).double()
        normed = readout.normed(h_ref), readout.normed(h_cand)
        z = rounded(normed[0]).double() @ weight.t()
        z_other = z + rounded(normed[1] - normed[0]).double() @ weight.t()
        z, z_other = _finite((_finished(z, readout), _finished(z_other, readout)), normed, readout)
        ids = z.sort(dim=-1, descending=True, stable=True)[1][:, :5]
        return LensStatistics(compare_exactly(z, z_other).kl, *deviations(z, z_other, ids))

    def _logits(self, readout: Readout, pair: Pair) -> Pair:
        """Read rows [n, H] off as float32 logits [n, V], by float32 products of rounded factors."""
        rounded, weight = ROUNDINGS[self.factors], _weight(readout)
        h, other = readout.normed(pair[0]), readout.normed(pair[1])
        rows = torch.cat([rounded(h), rounded(other - h)]).float()
        out = workspace.take("rounded logits", len(rows), len(weight), rows.device)
        for first in range(0, len(weight), COLUMNS):
            ids = slice(first, first + COLUMNS)
            out[:, ids] = torch.mm(rows, rounded(weight[ids]).float().t())
        z, z_other = out[: len(h)], out[len(h) :]
        z_other += z
        return _finite((readout.finish(z), readout.finish(z_other)), (h, other), readout)


def _weight(readout: Readout) -> Tensor:
    return cast(nn.Linear, readout.head).weight[: readout.width]


def _finite(logits: Pair, normed: Pair, readout: Readout) -> Pair:
    """Return the logits; rows in which one isn't finite are read anew without rounding."""
    odd = torch.stack([~torch.isfinite(z).all(-1) for z in logits]).any(0).nonzero().flatten()
    if len(odd):
        for z, h in zip(logits, normed, strict=True):
            z[odd] = readout.head_logits(h[odd]).to(z.dtype)
    return logits


def _finished(products: Tensor, readout: Readout) -> Tensor:
    """Do in float64 what `Readout.finish` does in float32."""
    logits = products * readout.scale
    cap = readout.softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _operator(factors: Rounded) -> Op[[Tensor, Tensor, Readout, int], LensStatistics]:
    ways = _Ways(factors)
    op: Op[[Tensor, Tensor, Readout, int], LensStatistics] = Op(ways.name)
    op.register("native", ways.why_not_native)(ways.native)
    op.register("aten")(ways.aten)
    op.register("reference")(ways.reference)
    return op


LENS_BFLOAT16, LENS_INT16 = _operator("bfloat16"), _operator("int16")
LENS_ROUNDED: Mapping[Rounded, Op[[Tensor, Tensor, Readout, int], LensStatistics]] = (
    MappingProxyType({"bfloat16": LENS_BFLOAT16, "int16": LENS_INT16})
)
"""The operator of each kind of factors."""
