"""A model of transformers that attends through a function of ours.

The function is registered under a name and finds what it needs in an attribute of the attention
module, which goes along when a model is copied. A model that ignores the name is refused, not run
as it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

__all__ = [
    "attend_through_",
    "check_whole_texts",
    "refuse_sinks",
    "register",
    "replace_attention_",
    "restored",
]


def register(name: str, attention: Any) -> None:
    """Make transformers know an attention that takes the masks of its eager one."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, eager_mask)


def replace_attention_(model: Any, name: str) -> list[nn.Module]:
    """Make every attention of `model` the registered one; return the attentions.

    Raises ValueError for a model whose attention can't be replaced, which stays as it was.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"{type(model).__name__} is no model of transformers.")
    attentions = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "config")]
    before = config._attn_implementation
    model.set_attn_implementation(name)
    if not attentions or any(m.config._attn_implementation != name for m in attentions):
        model.set_attn_implementation(before)
        raise ValueError(f"{type(model).__name__}: its attention can't be replaced.")
    return attentions


def attend_through_(model: Any, name: str, state: Any) -> None:
    """Replace every attention of `model`; each finds `state` in its attribute `_<name>`.

    Raises ValueError as `replace_attention_` does.
    """
    for module in replace_attention_(model, name):
        setattr(module, f"_{name}", state)


@contextmanager
def restored(model: Any, name: str) -> Iterator[None]:
    """Give the model its attention back at the end, and forget the state."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    try:
        yield
    finally:
        for module in model.modules():
            module.__dict__.pop(f"_{name}", None)
        if before is not None:
            model.set_attn_implementation(before)


def refuse_sinks(module: Any, s_aux: Tensor | None) -> None:
    """Raise ValueError for an attention whose softmax has learned sinks (gpt-oss)."""
    if s_aux is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks of its own, not supported.")


def check_whole_texts(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, s_aux: Tensor | None
) -> None:
    """Raise ValueError unless this is a pass over texts from their first token on."""
    refuse_sinks(module, s_aux)
    if query.shape[-2] != key.shape[-2]:
        raise ValueError("this attention takes whole texts in one pass, without a cache.")
    if mask is not None and not _begin_at_once(mask):
        raise ValueError("this attention takes texts padded on the right only.")


def _begin_at_once(mask: Tensor) -> bool:
    """Say whether the first query of every text sees its own key: padding on the left hides it."""
    first = mask[..., 0, 0]
    return bool((first if mask.dtype == torch.bool else first > torch.finfo(mask.dtype).min).all())
