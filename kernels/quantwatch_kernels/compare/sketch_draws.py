"""Seeded draws from the tail of a distribution: the same ids every night.

The uniform numbers are a hash of (seed, number of the draw), Vigna's SplitMix64: no generator has a
state that batches could change. Draws are stratified: M equal parts of the tail's cumulative mass,
one draw in each. Every id still comes up in proportion to its mass, so means stay unbiased, and the
few ids right below the largest K, which have most of the tail's mass, come up as often as they
should instead of by luck. n rows, V ids.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Tail", "draw_tail", "hashes", "uniforms"]

_BLOCK = 128
"""Ids whose masses are summed first, so that M draws look at M blocks and not at V masses."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Tail(NamedTuple):
    """What was drawn."""

    ids: Tensor
    """Int64 [n, M]; the likeliest id wherever the tail has no mass."""
    mass: Tensor
    """The tail's mass in units of the row's largest, float64 [n]."""


def hashes(seeds: Tensor, count: int) -> NDArray[np.uint64]:
    """Return the first `count` outputs of SplitMix64 for each int64 seed [n], uint64 [n, count]."""
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        x = seeds.cpu().numpy().view(np.uint64)[:, None] + steps
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))  # type: ignore[no-any-return]


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """Return `count` numbers in (0, 1) per seed, float64 [n, count], from int64 seeds [n]."""
    x = hashes(seeds, count)
    return torch.from_numpy(((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def draw_tail(masses: Tensor, top_ids: Tensor, count: int, seeds: Tensor) -> Tail:
    """Draw `count` ids per row in proportion to masses float32 [n, V], the top ids left out.

    The masses of the top ids are overwritten with 0.
    """
    masses.scatter_(1, top_ids, 0.0)
    blocks = _blocks(masses)
    sums = blocks.sum(-1).double().cumsum(-1)
    total = sums[:, -1:]
    parts = torch.arange(count, device=masses.device, dtype=torch.float64)
    # Below the total: the last block with mass is the last that can be drawn.
    wanted = (parts + uniforms(seeds, count).to(masses.device)) / count * total * (1 - 2.0**-50)
    block = torch.searchsorted(sums, wanted, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(len(masses), device=masses.device)[:, None], block]
    steps = inside.double().cumsum(-1)
    rest = torch.minimum(wanted - before, steps[..., -1] * (1 - 2.0**-50))
    ids = block * _BLOCK + torch.searchsorted(steps, rest[..., None], right=True)[..., 0]
    return Tail(torch.where(total > 0, ids, top_ids[:, :1]), total[:, 0])


def _blocks(masses: Tensor) -> Tensor:
    """Return masses [n, V] as [n, blocks, ids], the last block filled up with zeros."""
    missing = -masses.shape[1] % _BLOCK
    if missing:
        masses = torch.nn.functional.pad(masses, (0, missing))
    return masses.view(len(masses), masses.shape[1] // _BLOCK, _BLOCK)
