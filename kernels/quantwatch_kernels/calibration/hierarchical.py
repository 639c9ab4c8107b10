"""Hierarchical sampling: samples whose continuation runs through the model's strongest heads.

1. Every sample is continued by S tokens (greedily unless a temperature is given; fewer when the
   text ends). The first 20 % of the steps, at least one, are kept: n = ⌈0.2 · S⌉.
2. A head's activity in a sample is the variance of its attention weights over the keys
   (`attention.attention_variance`), mean over the n queries that chose those steps' tokens. One
   pass over sample and kept tokens gives it; no cache is read.
3. The strong heads are the 15 % (rounded up) with the highest activity, mean over the pool. A
   sample is kept if its own three most active heads are all among them.
4. Of the kept ones `count` are drawn; too few are filled up with a draw of the others, and the
   notes say by how many.

A chosen sample calibrates as it is in the pool: the continuation only rates it. Heads rank much the
same on most texts, so that the rule may keep nearly everything: the notes say how many.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quantwatch_kernels.calibration.attention import attention_reader, head_variances
from quantwatch_kernels.calibration.generation import continue_sample
from quantwatch_kernels.calibration.pool import check_count, check_pool, draw

__all__ = ["draw_kept", "head_activity", "kept_samples"]

STEPS = 20
_EARLY = 0.2
_TOP = 3
_STRONG = 0.15


def head_activity(
    model: nn.Module,
    pool: Sequence[Tensor],
    *,
    steps: int = STEPS,
    temperature: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Return the activity of every head in each continuation's early steps, float64 [N, heads].

    Raises ValueError for a bad pool, a sample of one token or one that doesn't fit the context with
    its continuation, and a model without attention weights.
    """
    check_pool(model, pool, shortest=2)
    rows = []
    for number, ids in enumerate(pool):
        try:
            tokens = continue_sample(model, ids, steps, temperature, seed + number)
            early = tokens[: math.ceil(_EARLY * len(tokens) - 1e-9)]
            # The last kept token is chosen by the one before it.
            read_ids = torch.cat([ids, early[None, :-1].to(ids)], 1)
            with attention_reader(model) as read:
                rows.append(head_variances(read, read_ids, slice(ids.shape[1] - 1, None))[0])
        except ValueError as error:
            raise ValueError(f"sample {number} of the pool: {error}") from error
    return torch.stack(rows)


def kept_samples(activity_NH: Tensor) -> list[int]:
    """Return the samples whose three most active heads are all strong ones.

    Raises ValueError when so few heads are strong that no sample could have three.
    """
    num_heads = activity_NH.shape[1]
    num_strong = math.ceil(_STRONG * num_heads - 1e-9)
    if num_strong < _TOP:
        raise ValueError(
            f"{_STRONG:.0%} of {num_heads} attention heads are {num_strong}: hierarchical sampling "
            f"needs at least {_TOP}."
        )
    strong = set(_strongest(activity_NH.mean(0), num_strong))
    return [
        number for number, row in enumerate(activity_NH) if set(_strongest(row, _TOP)) <= strong
    ]


def draw_kept(activity_NH: Tensor, count: int, seed: int) -> tuple[list[int], tuple[str, ...]]:
    """Return `count` samples, kept ones first, and notes on how many were kept and filled up."""
    total = len(activity_NH)
    check_count(count, total)
    kept = kept_samples(activity_NH)
    chosen = draw(kept, count, seed)
    notes = [
        f"{len(kept)} of {total} samples have their {_TOP} most active heads among the strongest"
    ]
    if len(chosen) < count:
        rest = [number for number in range(total) if number not in set(kept)]
        notes.append(f"{count - len(chosen)} of {count} were filled up at random")
        chosen += draw(rest, count - len(chosen), seed)
    return chosen, tuple(notes)


def _strongest(activity_H: Tensor, count: int) -> list[int]:
    order: list[int] = torch.argsort(activity_H, descending=True, stable=True).tolist()
    return order[:count]
