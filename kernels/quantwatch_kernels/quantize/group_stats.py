"""What the matrices of a group are fed, by key: of a layer on the walk, of embedding and head."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.experts import collect_expert_stats
from quantwatch_kernels.quantize.input_stats import InputStats, collect
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["layer_stats", "outer_stats"]


def layer_stats(walk: LayerWalk, index: int, parts: Sequence[Layer]) -> dict[str, InputStats]:
    """Return the statistics by key of what each part of layer `index` reads."""
    plain = [part for part in parts if part.expert is None]
    stacked = [part for part in parts if part.expert is not None]
    calls = [partial(walk.call, index, n, hidden) for n, hidden in enumerate(walk.hidden)]
    watched = [(part.key, part.module, part.weight.shape[1]) for part in plain]
    stats = collect(watched, calls) if plain else {}
    return stats | (collect_expert_stats(walk.model, stacked, calls) if stacked else {})


def outer_stats(model: nn.Module, part: Layer, inputs: Sequence[Tensor]) -> dict[str, InputStats]:
    """Return the statistics of what the head reads; of a table that is only looked up, none."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None or head.weight is not part.module.weight:
        return {part.key: _looked_up(part)}
    calls = [partial(model, ids, use_cache=False) for ids in inputs]
    return collect([(part.key, head, part.weight.shape[1])], calls)


def _looked_up(part: Layer) -> InputStats:
    """Every column of a table counts the same: H is the identity."""
    stats = InputStats(part.weight.shape[1])
    stats.add(torch.eye(part.weight.shape[1]) * (part.weight.shape[1] / 2) ** 0.5)
    return stats
