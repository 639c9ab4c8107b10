"""What all ways of reading rows through the lens share: which rows, and what comes of logits.

n rows, H hidden width, V ids.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.readout import Readout, check_width
from quantwatch_kernels.compare.rows import kl_rows
from quantwatch_kernels.compare.topk import top_k

__all__ = ["LensStatistics", "Sums", "deviations", "in_pieces", "whole_rows"]


class LensStatistics(NamedTuple):
    """Differences of the lens logits per row, float64 [n]: nats, and mean |Δ| over the top k."""

    kl: Tensor
    topk_logit_deviation_k5: Tensor
    topk_logit_deviation_k3: Tensor


Pair = tuple[Tensor, Tensor]
"""Hidden states or logits of the reference and of the candidate."""
Sums = Callable[[Pair, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Normed hidden states of both models and a head's weight → KL or NaN, both deviations."""


def in_pieces(
    pair: Pair,
    readout: Readout,
    size: int,
    sums: Sums,
    again: Callable[[Pair], LensStatistics],
) -> LensStatistics:
    """Compare rows [n, H] that differ, `size` at a time, by sums over pieces of the ids.

    `again` does rows that need a whole row: infinite logits, differences beyond float32. Raises
    ValueError for states that aren't as wide as the head takes.
    """
    out = torch.zeros(3, len(pair[0]), dtype=torch.float64, device=pair[0].device)
    rows = _differing(*pair)
    weight = cast(nn.Linear, readout.head).weight[: readout.width]
    for part in torch.split(rows, size) if len(rows) else ():
        normed = readout.normed(pair[0][part]), readout.normed(pair[1][part])
        check_width(normed[0], weight)
        out[:, part] = torch.stack(sums(normed, weight))
    whole = rows[out[0, rows].isnan()]
    if len(whole):  # for none of them, too, a head would be rounded
        out[:, whole] = torch.stack(again((pair[0][whole], pair[1][whole])))
    return LensStatistics(*out)


def whole_rows(pair: Pair, chunk: int, name: str, logits: Callable[[Pair], Pair]) -> LensStatistics:
    """Compare rows [n, H] that differ, `chunk` rows of logits at a time.

    `name` is the operator that rows done in float64 are counted for.
    """
    out = torch.zeros(3, len(pair[0]), dtype=torch.float64, device=pair[0].device)
    differing = _differing(*pair)
    for rows in torch.split(differing, chunk) if len(differing) else ():
        z_ref, z_cand = logits((pair[0][rows], pair[1][rows]))
        ids = top_k(z_ref, 5)
        kl = kl_rows(name, z_ref, z_cand)
        out[:, rows] = torch.stack([kl, *deviations(z_ref, z_cand, ids)])
    return LensStatistics(*out)


def deviations(z_ref: Tensor, z_cand: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean |Δ| over ids [n, 5], largest first, and over the first three of them."""
    reference, candidate = z_ref.gather(-1, ids).double(), z_cand.gather(-1, ids).double()
    gap = torch.where(reference == candidate, 0.0, (reference - candidate).abs())
    return gap.mean(-1), gap[:, :3].mean(-1)


def _differing(h_ref: Tensor, h_cand: Tensor) -> Tensor:
    """Return the rows that aren't equal bit for bit, or not finite, int64."""
    equal = ((h_ref == h_cand) & torch.isfinite(h_ref)).all(-1)
    return (~equal).nonzero().flatten()
