"""Sizes of a loaded model: ids, width of the logits, context, hidden size."""

from typing import Any

import torch
from torch import nn

from quantwatch.domain import EMBEDDING, HEAD
from quantwatch.models.anatomy import Anatomy
from quantwatch.models.tokenizers import num_ids

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def text_settings(module: nn.Module) -> Any | None:
    """Return the configuration of the language model inside a module, None without one."""
    settings: Any = getattr(module, "config", None)
    return settings.get_text_config(decoder=True) if hasattr(settings, "get_text_config") else None


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter that has values."""
    return next(p.device for p in module.parameters() if not p.is_meta)


def context_length(module: nn.Module) -> int | None:
    """Return the number of positions a model was made for, None when it doesn't say."""
    settings = text_settings(module)
    found = (getattr(settings, name, None) for name in CONTEXT_KEYS)
    return next((int(value) for value in found if value), None)


def logit_width(module: nn.Module, anatomy: Anatomy) -> int | None:
    """Return the number of logits per position, padding of the vocabulary included."""
    head = module.get_submodule(anatomy.taps[HEAD])
    out = getattr(head, "out_features", None)
    if isinstance(out, int):
        return out
    settings = text_settings(module)
    declared = getattr(settings, "vocab_size", None)
    if declared is not None:
        return int(declared)
    weight = getattr(head, "weight", None)
    return None if weight is None else int(weight.shape[0])


def hidden_size(module: nn.Module, anatomy: Anatomy) -> int | None:
    """Return the width of the hidden states."""
    declared = getattr(text_settings(module), "hidden_size", None)
    if declared is not None:
        return int(declared)
    weight = getattr(module.get_submodule(anatomy.taps[EMBEDDING]), "weight", None)
    return None if weight is None else int(weight.shape[-1])


def real_ids(
    module: nn.Module, anatomy: Anatomy, tokenizer: Any | None
) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of real token ids; a note says when the tokenizer has more."""
    width = logit_width(module, anatomy)
    if tokenizer is None:
        return width, ()
    ids = num_ids(tokenizer)
    if width is None or ids <= width:
        return ids, ()
    return width, (f"the tokenizer has {ids} ids, the model only {width}: the rest can't occur",)
