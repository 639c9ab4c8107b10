"""The engine's door into a transformers model: one attention function that asks who is running.

Inside `held(model)` every attention of the model calls `_attention`, which hands its queries, keys
and values to the object that `running` has put up for this forward pass. transformers makes no mask
for an attention that it knows no mask of; positions come as `position_ids`.

A model that is held does nothing else: outside `running` its attention raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

from quantwatch_kernels.serve.attend_through import refuse_sinks, replace_attention_
from quantwatch_kernels.serve.paged_attention import AttentionRule

__all__ = ["Attends", "AttentionCall", "held", "hold", "running"]

NAME = "quantwatch_engine"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's queries [T, Hq, D], keys [T, Hkv, D] and values [T, Hkv, Dv] of a flat batch."""

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    rule: AttentionRule


class Attends(Protocol):
    """Whoever answers the attention of a forward pass."""

    def attention(self, call: AttentionCall) -> Tensor:
        """Return [T, Hq, Dv]."""


_running: ContextVar[Attends | None] = ContextVar("running", default=None)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: [1, T, H, D] is returned."""
    who = _running.get()
    if who is None:
        raise ValueError(f"{type(module).__name__} is held by an engine; close the engine first.")
    _refuse(module, mask, kwargs)
    rule = AttentionRule(kwargs.get("scaling"), kwargs.get("softcap"), kwargs.get("sliding_window"))
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    out = who.attention(AttentionCall(module.layer_idx, queries, keys, values, rule))
    return out[None], None


def _refuse(module: Any, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    refuse_sinks(module, kwargs.get("s_aux"))
    causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    if mask is not None or causal is False:
        what = type(module).__name__
        raise ValueError(f"{what} isn't causal attention over one text, not supported.")


AttentionInterface.register(NAME, _attention)


@contextmanager
def running(who: Attends) -> Iterator[None]:
    """Inside, forward passes of held models are answered by `who`."""
    token = _running.set(who)
    try:
        yield
    finally:
        _running.reset(token)


def hold(model: Any) -> str:
    """Replace the attention of a model; return the name of what it had.

    Raises ValueError for a model whose attention can't be replaced, or that is held already.
    """
    before = str(model.config._attn_implementation)
    if before == NAME:
        raise ValueError(f"{type(model).__name__} is held by an engine already.")
    replace_attention_(model, NAME)
    return before


@contextmanager
def held(model: Any) -> Iterator[None]:
    """Inside, the model's attention is the engine's."""
    before = hold(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
