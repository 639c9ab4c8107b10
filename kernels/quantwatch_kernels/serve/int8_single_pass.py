"""A model whose attention makes its scores from int8 codes, in one pass over each text.

`attend_in_int8_(model, how)` puts `attention_int8` behind transformers' attention interface, with
its masks, scaling and soft-cap. Each text is quantized by itself, without its padding: what lies
beside it in a batch, and how long that is, changes nothing. Within a text a scale per tensor and
the keys' mean are those of all its tokens at once, as in a prefill; a later key can thus move the
rounding of an earlier score (by its size alone), which is part of what the method does.
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
from quantwatch_kernels.serve.attention_int8 import Int8Scores, int8_scores
from quantwatch_kernels.serve.kv_attention import Score

__all__ = ["attend_in_int8_", "attention_in_int8", "int8_text"]

NAME = "quantwatch_int8"


def int8_text(
    text: tuple[Tensor, Tensor, Tensor], how: Int8Scores, mask: Tensor | None, score: Score
) -> Tensor:
    """Return float32 [1, Hq, T, Dv] of one text: queries [1, Hq, T, D], keys [1, Hkv, T, D].

    Values are [1, Hkv, T, Dv]; `mask` is bool (True: seen), or added, [1, 1, T, T]; None: causal.
    """
    query, *shared = text
    tokens, groups = query.shape[2], query.shape[1] // shared[0].shape[1]
    keys, values = (x.float().repeat_interleave(groups, 1) for x in shared)
    products, shift = int8_scores(query, keys, how)
    # A soft-cap sees what is added to all scores of a query; softmax doesn't.
    scores = score.of(products if score.softcap is None else products + shift, query.shape[-1])
    if mask is None:
        ones = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
        mask = ones.tril()[None, None]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    if mask.dtype != torch.bool:
        scores = scores + mask.float()
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: [B, T, H, D] is returned."""
    check_whole_texts(module, query, key, mask, s_aux=kwargs.get("s_aux"))
    how: Int8Scores = getattr(module, f"_{NAME}")
    score = Score(kwargs.get("scaling"), kwargs.get("softcap"))
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for text in range(len(query)):
        own = None if mask is None else mask[min(text, len(mask) - 1)][None]
        tokens = query.shape[2] if own is None else _length(own)
        cut = None if own is None else own[..., :tokens, :tokens]
        parts = tuple(x[text : text + 1, :, :tokens] for x in (query, key, value))
        found = int8_text((parts[0], parts[1], parts[2]), how, cut, score)
        out[text, :, :tokens] = found[0].to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def _length(mask: Tensor) -> int:
    """Return how many tokens the text of a mask [1, 1, T, T] has: those that see themselves."""
    own = mask[0, 0].diagonal()
    return int((own if mask.dtype == torch.bool else own > torch.finfo(mask.dtype).min).sum())


register(NAME, _attention)


def attend_in_int8_(model: Any, how: Int8Scores) -> None:
    """Make `model` attend so from now on. Raises ValueError where that can't be done."""
    attend_through_(model, NAME, how)


@contextmanager
def attention_in_int8(model: Any, how: Int8Scores) -> Iterator[None]:
    """Inside, `model` attends so."""
    with restored(model, NAME):
        attend_in_int8_(model, how)
        yield
