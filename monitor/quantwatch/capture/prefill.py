"""Keys and values of a prompt that a model is given in chunks, and which models can take one so.

A layer that attends to everything gets room for the whole prompt at once: concatenating, as a cache
that grows does, would hold each layer twice and leave holes in memory. Sliding windows keep their
own kind, which holds a window. A model that carries anything else from token to token (a state, an
index, a compressed cache), or takes none, is refused with the reason; that it counts on from its
cache rightly is not believed but tried, on a few tokens.
"""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from quantwatch.capture.chunks import Chunk
from quantwatch.capture.long_attention import LongAttention
from quantwatch.domain import Prompt
from quantwatch.errors import CaptureError, ModelError, ResourceError
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.shapes import text_settings

_NAMES = ("cache", "past_key_values")
"""What transformers call the argument, now and before."""
_TRIED = (4, 3, 1)
"""Tokens of the chunks that a model is tried on: two that differ, and a last one alone."""
_ROUNDINGS = 1000
_LARGEST = 0.1
"""As for the noise floor's conditions: what a reference, and what any model may be off."""


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, in room for `length` tokens that is taken once."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._room: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the room, in the dtype and on the device of what comes first."""
        super().lazy_initialization(key_states, value_states)
        given = (key_states, value_states)
        keys, values = (
            states.new_empty(*states.shape[:-2], self._length, states.shape[-1]) for states in given
        )
        self._room = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, tokens, width] behind the others; return them all."""
        start = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self._room is not None
        stop = start + key_states.shape[-2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[..., start:stop, :] = states
        self.keys, self.values = (room[..., :stop, :] for room in self._room)
        return self.keys, self.values


class Prefill:
    """What one model keeps of one prompt between its chunks."""

    def __init__(self, model: LoadedModel, num_tokens: int) -> None:
        self.cache = empty_cache(model, num_tokens)
        self._parameters = inspect.signature(model.module.forward).parameters
        self._device = model.device
        self._attention = LongAttention(model)
        self._next = 0

    def attending(self, chunk: Chunk) -> AbstractContextManager[None]:
        """Return what a chunk has to go through the model in: its attention without a mask."""
        return nullcontext() if chunk.is_first else self._attention.switched()

    def options(self, chunk: Chunk) -> Mapping[str, Any]:
        """Return what the model's forward is given beside a chunk's token ids.

        Raises CaptureError for a chunk out of turn: the cache would hold other tokens before it.
        """
        if chunk.start != self._next:
            raise CaptureError(f"a chunk from {chunk.start} on came when {self._next} was due")
        self._next = chunk.stop
        name = next(name for name in _NAMES if name in self._parameters)
        wanted: dict[str, Any] = {name: self.cache}
        if "use_cache" in self._parameters:
            wanted["use_cache"] = True
        if "position_ids" in self._parameters:
            positions = torch.arange(chunk.start, chunk.stop, device=self._device)
            wanted["position_ids"] = positions[None]
        return wanted


def cache_bytes(cache: DynamicCache) -> int:
    """Return the bytes of keys and values that a cache holds."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def empty_cache(model: LoadedModel, num_tokens: int) -> DynamicCache:
    """Return a cache for so many tokens. Raises ModelError for a model that can't go in chunks."""
    reason = _obstacle(model)
    if reason is None:
        cache = DynamicCache(config=model.module.config)
        strange = [layer for layer in cache.layers if type(layer) not in _KINDS]
        if not strange:
            cache.layers = [
                ReservedLayer(num_tokens) if type(layer) is DynamicLayer else layer
                for layer in cache.layers
            ]
            return cache
        reason = f"it keeps a {type(strange[0]).__name__}, not keys and values alone"
    raise ModelError(f"{model.variant.name}: {_refused(reason)}")


_KINDS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)


def _obstacle(model: LoadedModel) -> str | None:
    """Say why a model has no KV cache of its own, None when it has."""
    settings = text_settings(model.module)
    parameters = inspect.signature(model.module.forward).parameters
    if settings is None or not any(name in parameters for name in _NAMES):
        return "its forward takes no KV cache"
    if getattr(model.module, "_is_stateful", False):
        return "it carries a state from token to token, not keys and values alone"
    return None


def _refused(reason: str) -> str:
    return f"a prompt can't go through it in chunks: {reason}; unset prefill_chunk to measure whole"


def prefill_effect(model: LoadedModel, prompt: Prompt, *, is_reference: bool) -> float:
    """Return how far a model's logits of a few tokens are off when they come in chunks.

    The largest ‖z − z'‖ ÷ ‖z‖ of a token. Rounding is expected: of the reference nothing else is
    allowed, of a candidate that rounds its activations a little more.

    Raises:
        ModelError: the model can't go in chunks, or counts on wrongly from its cache.
    """
    ids = torch.tensor([prompt.token_ids[: sum(_TRIED)]], device=model.device)
    try:
        with torch.no_grad():
            whole, pieces = _logits(model, ids), _in_pieces(model, prompt, ids)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        if "memory" in str(error).lower():
            raise ResourceError(f"{model.variant.name}: {error}") from error
        raise ModelError(f"{model.variant.name}: {_refused(str(error))}") from error
    effect = _largest(whole.double(), pieces.double())
    rounding = _ROUNDINGS * torch.finfo(model.dtype).eps if is_reference else _LARGEST
    if not effect <= min(rounding, _LARGEST):
        reason = f"its logits are off by {effect:.3g} then, more than rounding"
        raise ModelError(f"{model.variant.name}: {_refused(reason)}")
    return effect


def _logits(model: LoadedModel, ids: Tensor, **options: Any) -> Tensor:
    output: Any = model.module(ids, **options)
    logits: Tensor = getattr(output, "logits", output)
    return logits[0]


def _in_pieces(model: LoadedModel, prompt: Prompt, ids: Tensor) -> Tensor:
    prefill, found, start = Prefill(model, ids.shape[1]), [], 0
    for count in _TRIED:
        chunk = Chunk(prompt, start, min(start + count, ids.shape[1]))
        if chunk.stop > chunk.start:
            part = ids[:, chunk.start : chunk.stop]
            with prefill.attending(chunk):
                found.append(_logits(model, part, **prefill.options(chunk)))
        start = chunk.stop
    return torch.cat(found)


def _largest(whole: Tensor, pieces: Tensor) -> float:
    """Return the largest relative difference of a row [V]; equal rows differ by 0, even NaN."""
    same = (whole == pieces) | (whole.isnan() & pieces.isnan())
    difference = torch.where(same, 0.0, whole - pieces).norm(dim=-1)
    sizes = torch.where(whole.isfinite(), whole, 0.0).norm(dim=-1)
    errors = torch.where(difference == 0, 0.0, difference / sizes)
    return float(errors.nan_to_num(nan=torch.inf).max())
