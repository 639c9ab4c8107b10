"""Marlin's order of 4-bit codes and scales. Packing only: no kernel of ours has run on it.

Symmetric codes q = c + 8, W as [K, N], K a multiple of 16 (of 128 for the kernel), N of 64 (of
256), groups of 128 or whole rows. W is cut into tiles of 16 × 16; four tiles beside each other are
one fragment of 1024 codes, which 32 threads load as 32 codes each. Thread t, tile j, code r:

    row = 2·(t mod 4) + (r mod 2) + 8·(⌊r/2⌋ mod 2),   column = 16·j + ⌊t/4⌋ + 8·⌊r/4⌋

and the eight codes of (t, j) make one int32 word, interleaved 0 2 4 6 1 3 5 7. Scales [G, N] go in
blocks of 64 as the transpose of 8 × 8 (groups), or in blocks of 32 in the order of the accumulator
(whole rows). Source: the published layout (IST-DASLab/marlin); untested on hardware here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.interchange.words import (
    INTERLEAVED,
    check_whole_groups,
    float16_exactly,
    pack_words,
    unpack_words,
)
from quantwatch_kernels.quantize.recipe import PerGroup

__all__ = ["MarlinTensors", "from_marlin", "to_marlin"]

_FRAGMENT = 64
"""Columns of four tiles."""


class MarlinTensors(NamedTuple):
    """`words` int32 [K/16, 2·N] and `scales` float16 [G, N]."""

    words: Tensor
    scales: Tensor


def to_marlin(weight: QuantizedWeight) -> MarlinTensors:
    """Return a symmetric 4-bit weight in Marlin's order.

    Raises ValueError for other weights, sizes that don't fill fragments, a short last group, and
    scales that float16 can't hold.
    """
    rows, columns = weight.codes.shape
    if weight.spec.format.bits != 4 or not weight.spec.format.symmetric:
        raise ValueError(
            f"Marlin holds symmetric 4-bit codes; these are {weight.spec.format.name}."
        )
    if columns % 16 or rows % _FRAGMENT:
        raise ValueError(
            f"Marlin's fragments are 16 inputs by 64 outputs; this weight has {columns} by {rows}."
        )
    check_whole_groups(weight, "Marlin")
    codes = weight.codes.T.to(torch.int16) + 8
    fragments = codes.view(columns // 16, 16, rows // _FRAGMENT, _FRAGMENT).transpose(1, 2)
    row, column = _places()
    words = pack_words(fragments[..., row, column].flatten(-3), 4, INTERLEAVED)
    grouped = isinstance(weight.spec.granularity, PerGroup)
    scales = weight.qparams.scales if grouped else weight.qparams.scales[:, :1]
    stored = float16_exactly(scales, "Marlin").T.contiguous()
    order = _scale_order(grouped)
    permuted = stored.view(len(stored), -1, len(order))[..., order].reshape(stored.shape)
    return MarlinTensors(words.reshape(columns // 16, 2 * rows), permuted)


def from_marlin(tensors: MarlinTensors, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """Return symmetric codes int8 [N, K] and scales [N, G] in their own order again."""
    tiles, width = tensors.words.shape
    fragments = unpack_words(tensors.words, 4, INTERLEAVED).view(tiles, -1, 32, 4, 8)
    codes = torch.zeros(tiles, fragments.shape[1], 16, _FRAGMENT, dtype=torch.uint8)
    row, column = _places()
    codes[..., row, column] = fragments
    codes = codes.transpose(1, 2).reshape(tiles * 16, width // 2)
    order = _scale_order(grouped)
    blocks = tensors.scales.reshape(len(tensors.scales), -1, len(order))
    scales = torch.empty_like(blocks)
    scales[..., order] = blocks
    return codes.T.to(torch.int8) - 8, scales.view(tensors.scales.shape).T


def _places() -> tuple[Tensor, Tensor]:
    """Return row and column in a fragment of what (thread, tile, code) holds, [32, 4, 8]."""
    thread, tile, code = torch.meshgrid(
        torch.arange(32), torch.arange(4), torch.arange(8), indexing="ij"
    )
    row = 2 * (thread % 4) + code % 2 + 8 * (code // 2 % 2)
    return row, 16 * tile + thread // 4 + 8 * (code // 4)


def _scale_order(grouped: bool) -> Tensor:
    if grouped:
        return torch.arange(64).view(8, 8).T.flatten()
    pairs = torch.tensor([0, 1, 8, 9, 16, 17, 24, 25])
    return (2 * torch.arange(4).unsqueeze(1) + pairs).flatten()
