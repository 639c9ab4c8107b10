"""Per-layer KL: two hidden states read off through one fixed readout, the reference's own.

Through each model's own head a fault that is only in the head would blame layer 0.
n rows, H hidden width, V ids.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.lens_native import (
    PAIRS,
    fused_sums,
    why_not_native,
)
from quantwatch_kernels.compare.readout import Readout, why_not_a_product, why_not_pieces
from quantwatch_kernels.compare.rows import check_pair, kl_rows
from quantwatch_kernels.compare.topk import top_k
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import Op

__all__ = ["LensStatistics", "Readout", "lens_kl", "lens_statistics"]


class LensStatistics(NamedTuple):
    """Differences of the lens logits per row, float64 [n]: nats, and mean |Δ| over the top k."""

    kl: Tensor
    topk_logit_deviation_k5: Tensor
    topk_logit_deviation_k3: Tensor


_Sums = Callable[[tuple[Tensor, Tensor], Tensor], tuple[Tensor, Tensor, Tensor]]
"""Normed hidden states of both models and a head's weight → KL or NaN, both deviations."""

LENS: Op[[Tensor, Tensor, Readout, int], LensStatistics] = Op("lens_statistics")


def lens_statistics(
    h_ref: Tensor,
    h_cand: Tensor,
    readout: Readout,
    *,
    chunk: int = 64,
) -> LensStatistics:
    """Compare hidden states [n, H] through `readout`, `chunk` rows of logits at a time.

    The head's weights are read once per chunk and model: hand in the rows of many layers at once.
    Finite rows that are equal bit for bit are 0 without being read off. Raises ValueError for
    shapes that don't fit or chunk < 1.
    """
    check_pair("hidden states", h_ref, h_cand)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1; it is {chunk}.")
    # Elsewhere pieces aren't wanted in the first place: nothing falls back.
    usual = "native" if h_ref.device.type == "cpu" else "aten"
    with torch.no_grad():
        return LENS.run(LENS.preferred(usual), h_ref, h_cand, readout, chunk)


def lens_kl(h_ref: Tensor, h_cand: Tensor, readout: Readout) -> Tensor:
    """Return the per-layer KL of hidden states [n, H] through `readout`, nats, float64 [n]."""
    return lens_statistics(h_ref, h_cand, readout).kl


def _why_not_native(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> str | None:  # noqa: ARG001
    return why_not_pieces(readout.head) or why_not_native()


@LENS.register("native", _why_not_native)
def _native(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    return _in_pieces(h_ref, h_cand, readout, chunk, partial(fused_sums, finish=readout.finish))


def _in_pieces(
    h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int, sums: _Sums
) -> LensStatistics:
    out = torch.zeros(3, len(h_ref), dtype=torch.float64, device=h_ref.device)
    rows = _differing(h_ref, h_cand)
    weight = cast(nn.Linear, readout.head).weight[: readout.width]
    for part in torch.split(rows, PAIRS):
        pair = readout.normed(h_ref[part]), readout.normed(h_cand[part])
        out[:, part] = torch.stack(sums(pair, weight))
    return _redone(out, rows, (h_ref, h_cand), readout, chunk)


def _redone(
    out: Tensor, rows: Tensor, pair: tuple[Tensor, Tensor], readout: Readout, chunk: int
) -> LensStatistics:
    """Do rows again that need a whole row: infinite logits, differences beyond float32."""
    again = rows[out[0, rows].isnan()]
    out[:, again] = torch.stack(_aten(pair[0][again], pair[1][again], readout, chunk))
    return LensStatistics(*out)


def _differing(h_ref: Tensor, h_cand: Tensor) -> Tensor:
    """Return the rows that aren't equal bit for bit, or not finite, int64."""
    equal = ((h_ref == h_cand) & torch.isfinite(h_ref)).all(-1)
    return (~equal).nonzero().flatten()


@LENS.register("aten")
def _aten(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    out = torch.zeros(3, len(h_ref), dtype=torch.float64, device=h_ref.device)
    for rows in torch.split(_differing(h_ref, h_cand), chunk):
        z_ref = readout.logits(h_ref[rows], into="reference logits")
        z_cand = readout.logits(h_cand[rows], into="candidate logits")
        ids = top_k(z_ref, 5)
        kl = kl_rows(LENS.name, z_ref, z_cand)
        out[:, rows] = torch.stack([kl, *_deviations(z_ref, z_cand, ids)])
    return LensStatistics(*out)


def _triton_why_not(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> str | None:
    del h_cand, chunk
    if reason := why_not_a_product(readout.head):
        return reason
    dtype = cast(nn.Linear, readout.head).weight.dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the Triton kernel sums in float32, not {dtype}"
    return triton_why_not(h_ref, bfloat16=dtype == torch.bfloat16)


@LENS.register("triton", _triton_why_not)
def _triton(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:
    from quantwatch_kernels.compare.triton.lens import Finish, fused_sums_triton

    sums = partial(fused_sums_triton, finish=Finish(readout.scale, readout.softcap))
    return _in_pieces(h_ref, h_cand, readout, chunk, sums)


@LENS.register("reference")
def _reference(h_ref: Tensor, h_cand: Tensor, readout: Readout, chunk: int) -> LensStatistics:  # noqa: ARG001
    z_ref, z_cand = readout.logits(h_ref), readout.logits(h_cand)
    ids = z_ref.sort(dim=-1, descending=True, stable=True)[1][:, :5]
    return LensStatistics(compare_exactly(z_ref, z_cand).kl, *_deviations(z_ref, z_cand, ids))


def _deviations(z_ref: Tensor, z_cand: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    reference, candidate = z_ref.gather(-1, ids).double(), z_cand.gather(-1, ids).double()
    gap = torch.where(reference == candidate, 0.0, (reference - candidate).abs())
    return gap.mean(-1), gap[:, :3].mean(-1)
