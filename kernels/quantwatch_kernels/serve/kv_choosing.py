"""Top pages in a cache for transformers: `generate()` with keys that each query chooses.

    with choosing(model, cache):
        model.generate(ids, cache=cache)

A cache never sees a query. So inside, the model attends through a function that asks its layer's
cache: codes are read as everywhere, the bounds of each page lie beside them, and all keys behind
the sinks wait in host memory. Of those a step fetches the pages that some query of it chose
(`kv_top_pages`). The numbers are those of `quantized_kv` with the same scheme.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantwatch_kernels.serve.attend_through import (
    attend_through_,
    refuse_sinks,
    register,
    restored,
)
from quantwatch_kernels.serve.kv_attention import Score, mixed_attention, seen_keys
from quantwatch_kernels.serve.kv_cache import ChoosingLayer, QuantizedCache

__all__ = ["choosing"]

NAME = "quantwatch_kv_choosing"
_STATE = f"_{NAME}"
"""Attribute of an attention module: the cache."""


@contextmanager
def choosing(model: Any, cache: QuantizedCache) -> Iterator[None]:
    """Inside, `model` reads this cache, and no other, with the pages its queries choose.

    Raises ValueError for a scheme without top pages, and for a model whose attention can't be
    replaced.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, ChoosingLayer)]
    if not layers:
        raise ValueError("the cache's scheme has no top pages: nothing is chosen.")
    with restored(model, NAME):
        attend_through_(model, NAME, cache)
        for layer in layers:
            layer.attended = True
        try:
            yield
        finally:
            for layer in layers:
                layer.attended = False


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: [B, T, H, D] is returned."""
    refuse_sinks(module, kwargs.get("s_aux"))
    layer = getattr(module, _STATE).layers[module.layer_idx]
    if key.shape[-2] != layer.get_seq_length():
        raise ValueError("the model runs without the cache that its queries choose from.")
    queries, keys = query.shape[-2], key.shape[-2]
    reads = torch.zeros(queries, keys, dtype=torch.bool, device=key.device)
    chosen, exact = reads, key
    if isinstance(layer, ChoosingLayer):
        reads = layer.codes_read(keys).to(key.device).expand(queries, keys)
        chosen, exact = layer.fetch(query, key, reads, seen_keys(mask, reads)[0])
    score = Score(kwargs.get("scaling"), kwargs.get("softcap"))
    read = (reads & ~chosen, reads)
    out = mixed_attention(query, (exact, value), (key, value), read, mask, score)
    return out.transpose(1, 2).contiguous(), None


register(NAME, _attention)
