"""A model that runs through a quantized KV cache, in one pass over each text.

Inside `quantized_kv(model, scheme)` every attention of the model is `mixed_attention`: its keys and
values are stored and restored chunk by chunk as a cache would, and each query reads codes or full
precision as it would find them. Hooks, batches and captures work as on the plain model.

The queries of a pass are taken as one text each, from its first token: padding on the left or a
cache given by the caller is refused, since positions would be others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantwatch_kernels.serve.attend_through import (
    attend_through_,
    check_whole_texts,
    register,
    restored,
)
from quantwatch_kernels.serve.kv_attention import Score, mixed_attention
from quantwatch_kernels.serve.kv_quant import restore, store
from quantwatch_kernels.serve.kv_reads import reads_codes
from quantwatch_kernels.serve.kv_scheme import KVScheme, PlaneScheme

__all__ = ["head_features", "quantized_kv", "serve_through_", "through_codes"]

NAME = "quantwatch_kv"
_STATE = f"_{NAME}"
"""Attribute of an attention module: (scheme, prefill)."""


def through_codes(x_BHTD: Tensor, plane: PlaneScheme, scheme: KVScheme) -> Tensor:
    """Return x as codes say it where a cache of this many tokens could ever hold codes.

    [B, H, T, D] in x's dtype, at least float32; sinks and the last tokens, which fill no flush, are
    as they are.
    """
    exact = x_BHTD.to(torch.promote_types(x_BHTD.dtype, torch.float32))
    first, tokens = scheme.sinks, x_BHTD.shape[-2]
    end = first + max(tokens - first, 0) // scheme.flush * scheme.flush
    coded = restore(store(x_BHTD[..., first:end, :], plane), plane).to(exact.dtype)
    return torch.cat([exact[..., :first, :], coded, exact[..., end:, :]], -2)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: [B, T, H, D] is returned."""
    check_whole_texts(module, query, key, mask, s_aux=kwargs.get("s_aux"))
    scheme, prefill = getattr(module, _STATE)
    exact = coded = (key, value)
    if module.layer_idx not in scheme.high_layers:
        planes = (scheme.keys, scheme.values)
        keys, values = (through_codes(x, p, scheme) for x, p in zip(exact, planes, strict=True))
        coded = keys, values
    reads = reads_codes(scheme, query.shape[-2], key.shape[-2], prefill).to(query.device)
    score = Score(kwargs.get("scaling"), kwargs.get("softcap"))
    out = mixed_attention(query, exact, coded, reads, mask, score)
    return out.transpose(1, 2).contiguous(), None


register(NAME, _attention)


def head_features(model: Any) -> int:
    """Return the width of one head, of a transformers model."""
    text = model.config.get_text_config(decoder=True)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def serve_through_(model: Any, scheme: KVScheme, prefill: int = 0) -> None:
    """Make `model` attend through a cache of this scheme from now on.

    The first `prefill` tokens of a text come at once, the others one by one. Raises ValueError for
    a model whose attention can't be replaced, and for high layers that it doesn't have.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        count = config.get_text_config(decoder=True).num_hidden_layers
        if any(layer >= count for layer in scheme.high_layers):
            raise ValueError(
                f"layers {list(scheme.high_layers)} are to stay high; the model has {count}."
            )
    attend_through_(model, NAME, (scheme, prefill))


@contextmanager
def quantized_kv(model: Any, scheme: KVScheme, prefill: int = 0) -> Iterator[None]:
    """Inside, `model` attends through a cache of this scheme; see `serve_through_`."""
    with restored(model, NAME):
        serve_through_(model, scheme, prefill)
        yield
