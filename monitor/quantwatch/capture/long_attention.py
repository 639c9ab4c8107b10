"""The attention of a chunk to everything before it, in memory that doesn't grow with its distance.

For a chunk behind the first, transformers' SDPA attention makes a mask of chunk × length, torch
turns it into floats, and keys and values are copied for each query head that shares them: more than
the caches grow by. All three can be had as views. Row i of a causal mask is the last row, moved by
as many columns as there are queries behind i; torch has no negative strides, but with the queries
in reverse order each row is the one before, moved to the left, and the whole mask a view of one row
of Q + K numbers. Shared heads torch can read where they are. The same kernel adds up the same
numbers in the same order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from quantwatch.models.loaded import LoadedModel

_NAME, _USUAL = "quantwatch_long", "sdpa"


class LongAttention:
    """One model's attention, switched while a chunk behind the first goes through.

    Models on another device, with another attention than SDPA or one that can't be switched keep
    theirs and the mask.
    """

    def __init__(self, model: LoadedModel) -> None:
        can_switch = getattr(model.module, "_can_set_attn_implementation", lambda: False)()
        switched = can_switch and model.device.type == "cpu"
        self._before = _named(model.module) if switched else []
        self._within = [(each, _NAME if n == _USUAL else n) for each, n in self._before]

    @contextmanager
    def switched(self) -> Iterator[None]:
        """Attend without a mask inside; every part gets back what it had, however this ends."""
        try:
            _name(self._within)
            yield
        finally:
            _name(self._before)


def _named(module: nn.Module) -> list[tuple[Any, str]]:
    """Return a model's configurations, outer ones first, and their attentions' names."""
    found: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    configs = {id(c): c for c in found if hasattr(c, "_attn_implementation")}.values()
    return [(config, config._attn_implementation) for config in configs]


def _name(configs: list[tuple[Any, str]]) -> None:
    for config, name in configs:  # outer ones hand theirs on, inner ones come later
        config._attn_implementation = name


def attend_behind(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, dropout: float = 0.0
) -> Tensor:
    """Return the attention of the last Q of K tokens, each to itself and all before it.

    `query` [B, heads, Q, width], `key` and `value` [B, heads that are shared, K, width]; the result
    is [B, heads, Q, width of a value].
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    row = query.new_zeros(num_queries + num_keys - 1)
    row[num_keys:] = -torch.inf
    mask = row.as_strided((1, 1, num_queries, num_keys), (0, 0, 1, 1))
    found = nn.functional.scaled_dot_product_attention(
        query.flip(2),
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.flip(2)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' SDPA does; without a mask, a chunk sees all that is before it."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    is_behind = causal and attention_mask is None and 1 < query.shape[2] < key.shape[2]
    others = any(options.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    if is_behind and not others:
        dropout = options.get("dropout", 0.0)
        scale = options.get("scaling")
        found = attend_behind(query, key, value, scale=scale, dropout=dropout)
        return found.transpose(1, 2).contiguous(), None
    if is_behind:
        mask = query.new_ones((query.shape[2], key.shape[2]), dtype=torch.bool)
        attention_mask = mask.tril(key.shape[2] - query.shape[2])[None, None]
    found, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return found, None


def _mask(**given: Any) -> Tensor | None:
    """Return None where `_attention` needs no mask, else the mask of SDPA."""
    is_plain = given.get("mask_function") is causal_mask_function
    is_padded = given.get("attention_mask") is not None
    is_last = given["q_offset"] + given["q_length"] == given["kv_length"]
    may_be_none = is_last and not given.get("kv_offset") and given.get("allow_is_causal_skip")
    if is_plain and not is_padded and may_be_none:
        return None
    found: Tensor | None = sdpa_mask(**given)
    return found


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)
