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
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from quantwatch_kernels.serve.kv_attention import Score, mixed_attention
from quantwatch_kernels.serve.kv_quant import restore, store
from quantwatch_kernels.serve.kv_reads import reads_codes
from quantwatch_kernels.serve.kv_scheme import KVScheme, PlaneScheme

__all__ = ["head_features", "quantized_kv", "serve_through_", "through_codes"]

NAME = "quantwatch_kv"


_STATE = "_quantwatch_kv"
"""Attribute of an attention module: (scheme, prefill). It goes along when a model is copied."""


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
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks of its own, not supported.")
    if query.shape[-2] != key.shape[-2]:
        raise ValueError("a pass through a quantized cache takes whole texts, without a cache.")
    if mask is not None and not _begin_at_once(mask):
        raise ValueError("a pass through a quantized cache takes texts padded on the right only.")
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


def _begin_at_once(mask: Tensor) -> bool:
    """Say whether the first query of every text sees its own key: padding on the left hides it."""
    first = mask[..., 0, 0]
    return bool((first if mask.dtype == torch.bool else first > torch.finfo(mask.dtype).min).all())


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


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
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"{type(model).__name__} is no model of transformers.")
    count = config.get_text_config(decoder=True).num_hidden_layers
    if any(layer >= count for layer in scheme.high_layers):
        raise ValueError(
            f"layers {list(scheme.high_layers)} are to stay high; the model has {count}."
        )
    attentions = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "config")]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if not attentions or any(m.config._attn_implementation != NAME for m in attentions):
        model.set_attn_implementation(before)
        raise ValueError(f"{type(model).__name__}: its attention can't be replaced.")
    for module in attentions:
        setattr(module, _STATE, (scheme, prefill))


@contextmanager
def quantized_kv(model: Any, scheme: KVScheme, prefill: int = 0) -> Iterator[None]:
    """Inside, `model` attends through a cache of this scheme; see `serve_through_`."""
    before = model.config._attn_implementation
    serve_through_(model, scheme, prefill)
    try:
        yield
    finally:
        for module in model.modules():
            module.__dict__.pop(_STATE, None)
        model.set_attn_implementation(before)
