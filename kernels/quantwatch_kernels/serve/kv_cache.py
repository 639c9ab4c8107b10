"""A KV cache of codes for transformers: `generate()`, prefill and decode, any attention.

`model.generate(ids, cache=QuantizedCache(scheme, num_layers))`. Each layer keeps the sinks and the
newest tokens in full precision and everything between as `StoredPlane`s, one per flush, which are
never changed. `update` returns all keys and values, what is stored restored from its codes: a chunk
of queries reads what is stored once its own keys are in, or with `own = "exact"` what was stored
before (`kv_reads`). Restoring at each step costs time, not
memory: nothing but one layer's numbers exists in full precision at a time. Pages that a query
chooses need the model to attend through `kv_choosing.choosing`.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from quantwatch_kernels.serve.kv_gain import KVGains, check_gains
from quantwatch_kernels.serve.kv_plane import PlaneScheme
from quantwatch_kernels.serve.kv_policy import KVScheme
from quantwatch_kernels.serve.kv_quant import StoredPlane, restore, store
from quantwatch_kernels.serve.kv_top_pages import HostKeys, choose

Own = Literal["codes", "exact"]
"""Whether a chunk of queries finds codes of its own keys, or itself in full precision."""

__all__ = ["ChoosingLayer", "QuantizedCache", "QuantizedLayer"]


class _Plane:
    """Keys or values of one layer: sinks, stored chunks, the rest."""

    def __init__(self, plane: PlaneScheme, like: Tensor) -> None:
        self.plane = plane
        self.sinks = like[..., :0, :]
        self.stored: list[StoredPlane] = []
        self.rest = like[..., :0, :]

    def flush(self, tokens: int) -> None:
        """Store the first `tokens` of the rest, if there are any."""
        if tokens:
            self.stored.append(store(self.rest[..., :tokens, :], self.plane))
            self.rest = self.rest[..., tokens:, :].clone()

    def add(self, new: Tensor, sinks: int) -> None:
        missing = max(sinks - self.sinks.shape[-2], 0)
        self.sinks = torch.cat([self.sinks, new[..., :missing, :]], -2)
        self.rest = torch.cat([self.rest, new[..., missing:, :]], -2)

    def read(self, gain: Tensor | None) -> Tensor:
        coded = [restore(chunk, self.plane).to(self.rest.dtype) for chunk in self.stored]
        if gain is not None:
            coded = [chunk * gain.to(chunk.device, chunk.dtype) for chunk in coded]
        return torch.cat([self.sinks, *coded, self.rest], -2)

    @property
    def num_bytes(self) -> int:
        kept = self.sinks.nbytes + self.rest.nbytes
        return kept + sum(chunk.num_bytes for chunk in self.stored)


class QuantizedLayer(CacheLayerMixin):  # type: ignore[misc]  # an untyped library
    """One layer's cache; batch and heads are fixed by the first tokens."""

    is_sliding = False

    def __init__(
        self, scheme: KVScheme, own: Own = "codes", gains: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Keep nothing yet."""
        super().__init__()
        self.scheme, self.own = scheme, own
        self._gains = (None, None) if gains is None else gains
        self._planes: tuple[_Plane, _Plane] | None = None
        self._tokens = self._read_end = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take over batch, heads and dtype."""
        self.device = key_states.device
        self._planes = (
            _Plane(self.scheme.keys, key_states),
            _Plane(self.scheme.values, value_states),
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add new tokens [B, Hkv, n, D], store what is due, return all keys and values."""
        if self._planes is None:
            self.lazy_initialization(key_states, value_states)
        assert self._planes is not None
        stored = self.scheme.stored_end(self._tokens)
        self._tokens += key_states.shape[-2]
        self._read_end = self.scheme.stored_end(self._tokens) if self.own == "codes" else stored
        due = self.scheme.stored_end(self._tokens) - max(stored, self.scheme.sinks)
        for plane, new in zip(self._planes, (key_states, value_states), strict=True):
            plane.add(new, self.scheme.sinks)
            if self.own == "codes":
                plane.flush(max(due, 0))
        keys, values = (p.read(g) for p, g in zip(self._planes, self._gains, strict=True))
        if self.own == "exact":
            for plane in self._planes:
                plane.flush(max(due, 0))
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that `query_length` new tokens will see, and offset 0."""
        return self._tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self._tokens

    def get_max_length(self) -> int:
        """Return -1: it grows."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self._planes, self.is_initialized = None, False
        self._tokens = self._read_end = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:  # noqa: ARG002 — the caller's signature
        """Refuse: the rows of stored codes are not moved between beams."""
        raise ValueError("a quantized cache can't be reordered for beams; use num_beams=1.")

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales, zeros, products and what is in full precision."""
        return sum(plane.num_bytes for plane in self._planes or ())

    def codes_read(self, keys: int) -> Tensor:
        """Return bool [keys]: what the last `update` read from codes."""
        position = torch.arange(keys)
        return (position >= self.scheme.sinks) & (position < self._read_end)


class ChoosingLayer(QuantizedLayer):
    """One whose queries choose pages of keys that they read in full precision."""

    attended = False
    """Whether the model's attention asks for pages; else codes alone would be read, unsaid."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add new tokens as every cache does, and their keys to those in host memory."""
        if not self.attended:
            raise ValueError("pages are chosen by queries: run inside `choosing(model, cache)`.")
        if self._tokens == 0:
            self._host = HostKeys(key_states[..., :0, :], self.scheme.page)
        self._host.add(key_states[..., max(self.scheme.sinks - self._tokens, 0) :, :])
        return super().update(key_states, value_states, *args, **kwargs)

    def fetch(
        self, query: Tensor, keys: Tensor, codes_read: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return which keys are chosen, [B, Hkv, Tq, Tk], and `keys` with those as they were."""
        chosen = choose(query, self._host.bounds, self.scheme, codes_read, seen)
        wanted = chosen.flatten(0, 2).any(0).nonzero().flatten()
        fetched = self._host.keys[..., (wanted - self.scheme.sinks).cpu(), :]
        return chosen, keys.index_copy(-2, wanted, fetched.to(keys))

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        del self._host

    @property
    def host_bytes(self) -> int:
        """Bytes of the keys in host memory."""
        return self._host.keys.nbytes if self._tokens else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of what every cache keeps and of the bounds."""
        return super().num_bytes + (
            sum(bound.nbytes for bound in self._host.bounds) if self._tokens else 0
        )


class QuantizedCache(Cache):  # type: ignore[misc]  # an untyped library
    """The cache of a whole model; layers in `scheme.high_layers` are plain."""

    def __init__(
        self, scheme: KVScheme, num_layers: int, own: Own = "codes", gains: KVGains | None = None
    ) -> None:
        """`num_layers`: of the model.

        Raises ValueError for high layers that it doesn't have, and for gains that are missing or
        too many.
        """
        check_gains(scheme, gains)
        wrong = [layer for layer in scheme.high_layers if layer >= num_layers]
        if wrong:
            raise ValueError(f"layers {wrong} are to stay high; the model has {num_layers}.")
        high, kind = set(scheme.high_layers), ChoosingLayer if scheme.top_pages else QuantizedLayer
        layers = [
            DynamicLayer()
            if number in high
            else kind(scheme, own, None if gains is None else gains.by_layer[number])
            for number in range(num_layers)
        ]
        super().__init__(layers=layers)
        self.scheme = scheme

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                total += layer.num_bytes
            elif layer.is_initialized:
                total += layer.keys.nbytes + layer.values.nbytes
        return total
