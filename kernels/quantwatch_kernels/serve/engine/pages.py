"""Keys and values of all layers in pages, and how rows of tokens come out of them.

A plane is [num_blocks, page_size, Hkv, D] per layer, for keys and for values. Writing goes by slot
(block · page_size + place), reading by *head row* (slot · Hkv + head): one index_select then makes
[B, Hkv, S, D] that is contiguous, which attention on a CPU needs to be fast. Only slots that a
request has written are ever in an index; padding reads slot 0, in the null block, which stays zero.
So what a page held before may be anything, NaN included.

`FloatPages` keep numbers as they are. `CodePages` keep the codes of schemes that store each token
by itself (one scale per token, head and group): such codes don't depend on how a text was cut into
chunks, and a query reads them for all keys, its own too, just as `QuantizedCache` has it. Zero
points take a byte and scales four here: a plane has one dtype, whatever a scale needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantwatch_kernels.quantize.packing import pack, unpack
from quantwatch_kernels.serve.block_pool import NULL_BLOCK, Writable
from quantwatch_kernels.serve.kv_quant import StoredPlane, restore, store
from quantwatch_kernels.serve.kv_scheme import KVScheme, PlaneScheme

__all__ = ["CodePages", "FloatPages", "LayerShape", "Pages", "PoolShape", "make_pages"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads of keys and values of one layer, and their widths."""

    heads: int
    key_features: int
    value_features: int


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What all layers share."""

    num_blocks: int
    page_size: int
    dtype: torch.dtype
    device: torch.device


class Pages(Protocol):
    """The store of a pool's pages."""

    planes: list[Tensor]
    """[num_blocks, …] each: what a page consists of, to be copied and swapped."""
    page_size: int

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [T, Hkv, D] of new tokens into their slots, int64 [T]."""

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Hkv, S, D] by head rows, int64 [B, Hkv, S]."""


class FloatPages:
    """Numbers as the model makes them."""

    def __init__(self, shapes: Sequence[LayerShape], pool: PoolShape) -> None:
        self.page_size = pool.page_size
        self._layers = [
            (_plane(pool, one.heads, one.key_features), _plane(pool, one.heads, one.value_features))
            for one in shapes
        ]
        self.planes = [plane for layer in self._layers for plane in layer]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [T, Hkv, D] of new tokens into their slots."""
        for plane, new in zip(self._layers[layer], (keys, values), strict=True):
            plane.flatten(0, 1).index_copy_(0, slots, new)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Hkv, S, D] by head rows."""
        keys, values = (
            plane.view(-1, plane.shape[-1]).index_select(0, rows.view(-1)).view(*rows.shape, -1)
            for plane in self._layers[layer]
        )
        return keys, values


class _Coded:
    """Keys or values of one layer as codes."""

    def __init__(self, heads: int, features: int, plane: PlaneScheme, pool: PoolShape) -> None:
        self._plane = plane
        sample = store(torch.zeros(1, 1, 1, features), plane)
        groups = sample.scales.shape[-1]
        self.codes = _plane(pool, heads, sample.codes.shape[-1], torch.uint8)
        self.scales = _plane(pool, heads, groups, torch.float32)
        self.zeros = None if plane.symmetric else _plane(pool, heads, groups, torch.uint8)
        self._features, self._dtype = features, pool.dtype

    @property
    def parts(self) -> list[Tensor]:
        found = [self.codes, self.scales, self.zeros]
        return [part for part in found if part is not None]

    def write(self, slots: Tensor, x_THD: Tensor) -> None:
        stored = store(x_THD[None], self._plane)
        self._put(self.codes, slots, stored.codes)
        self._put(self.scales, slots, stored.scales)
        if self.zeros is not None and stored.zeros is not None:
            packed = unpack(stored.zeros, self._plane.spec.format, stored.scales.numel())
            self._put(self.zeros, slots, packed.view(stored.scales.shape))

    def read(self, rows: Tensor) -> Tensor:
        flat = rows.view(-1)
        codes, scales, *zeros = (
            part.view(-1, part.shape[-1]).index_select(0, flat) for part in self.parts
        )
        packed = pack(zeros[0].flatten(), self._plane.spec.format) if zeros else None
        batch, heads, tokens = rows.shape
        shape = (batch, heads, tokens, self._features)
        stored = StoredPlane(codes, scales, packed, None, None, shape)
        return restore(stored, self._plane).to(self._dtype)

    def _put(self, part: Tensor, slots: Tensor, new: Tensor) -> None:
        rows = new.view(len(slots), part.shape[2], part.shape[3])
        part.flatten(0, 1).index_copy_(0, slots, rows.to(part.dtype))


class CodePages:
    """Codes of a scheme that stores token by token. Raises ValueError for any other."""

    def __init__(self, shapes: Sequence[LayerShape], pool: PoolShape, scheme: KVScheme) -> None:
        check_scheme(scheme)
        self.page_size = pool.page_size
        self._layers = [
            (
                _Coded(one.heads, one.key_features, scheme.keys, pool),
                _Coded(one.heads, one.value_features, scheme.values, pool),
            )
            for one in shapes
        ]
        self.planes = [part for layer in self._layers for one in layer for part in one.parts]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [T, Hkv, D] of new tokens into their slots, as codes."""
        for coded, new in zip(self._layers[layer], (keys, values), strict=True):
            coded.write(slots, new)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return restored keys and values [B, Hkv, S, D] by head rows."""
        keys, values = (coded.read(rows) for coded in self._layers[layer])
        return keys, values


def make_pages(shapes: Sequence[LayerShape], pool: PoolShape, scheme: KVScheme | None) -> Pages:
    """Return pages of numbers, or of codes."""
    return FloatPages(shapes, pool) if scheme is None else CodePages(shapes, pool, scheme)


def check_scheme(scheme: KVScheme) -> None:
    """Raise ValueError for a scheme whose codes can't lie in pages token by token."""
    if scheme.flush != 1 or scheme.window or scheme.sinks or scheme.high_layers:
        raise ValueError(
            "pages hold schemes that store every token by itself: scales per token, no group of "
            f"tokens, no product, no mean, no sinks, window or high layers; this one flushes "
            f"{scheme.flush} tokens and has {scheme.sinks} sinks, a window of {scheme.window} and "
            f"high layers {list(scheme.high_layers)}."
        )


def copy_pages(pages: Pages, copies: Sequence[Writable]) -> None:
    """Copy pages in the order they were asked for."""
    for block, source in copies:
        if source is not None:
            for plane in pages.planes:
                plane[block].copy_(plane[source])


def _plane(pool: PoolShape, heads: int, features: int, dtype: torch.dtype | None = None) -> Tensor:
    shape = (pool.num_blocks, pool.page_size, heads, features)
    plane = torch.empty(shape, dtype=dtype or pool.dtype, device=pool.device)
    plane[NULL_BLOCK] = 0
    return plane
