"""Keys and values of all layers in pages, and how rows of tokens come out of them.

A plane is [num_blocks, page_size, Hkv, D] per layer, for keys and for values. Writing goes by slot
(block · page_size + place), reading by *head row* (slot · Hkv + head): one index_select then makes
[B, Hkv, S, D] that is contiguous, which attention on a CPU needs to be fast. Only slots that a
request has written are ever in an index; padding reads slot 0, in the null block, which stays zero.
So what a page held before may be anything, NaN included.

`FloatPages` keep numbers as they are. `CodePages` keep the codes of schemes that store each token
by itself (`kv_pages.py`): such codes don't depend on how a text was cut into chunks, and a query
reads them for all keys, its own too, just as `QuantizedCache` has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantwatch_kernels.serve.block_pool import NULL_BLOCK, Writable
from quantwatch_kernels.serve.kv_pages import PageShape, QuantizedPages
from quantwatch_kernels.serve.kv_policy import KVScheme

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


class CodePages:
    """Codes of a scheme that stores token by token. Raises ValueError for others (`kv_pages`)."""

    def __init__(self, shapes: Sequence[LayerShape], pool: PoolShape, scheme: KVScheme) -> None:
        self.page_size, self._dtype = pool.page_size, pool.dtype
        self._layers = [
            QuantizedPages(pool.num_blocks, _page(one, pool), scheme, pool.device) for one in shapes
        ]
        self.planes = [layer.memory for layer in self._layers]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [T, Hkv, D] of new tokens into their slots, as codes."""
        self._layers[layer].write(slots, keys, values)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return restored keys and values [B, Hkv, S, D] by head rows."""
        batch, heads, tokens = rows.shape
        slots = rows[:, 0].flatten() // heads
        keys, values = (
            x.view(batch, tokens, heads, -1).transpose(1, 2).to(self._dtype).contiguous()
            for x in self._layers[layer].read(slots)
        )
        return keys, values


def _page(shape: LayerShape, pool: PoolShape) -> PageShape:
    if shape.key_features != shape.value_features:
        raise ValueError(
            f"pages of codes take keys and values of one width; these have {shape.key_features} "
            f"and {shape.value_features} features."
        )
    return PageShape(pool.page_size, shape.heads, shape.key_features)


def make_pages(shapes: Sequence[LayerShape], pool: PoolShape, scheme: KVScheme | None) -> Pages:
    """Return pages of numbers, or of codes."""
    return FloatPages(shapes, pool) if scheme is None else CodePages(shapes, pool, scheme)


def copy_pages(pages: Pages, copies: Sequence[Writable]) -> None:
    """Copy pages in the order they were asked for."""
    for block, source in copies:
        if source is not None:
            for plane in pages.planes:
                plane[block].copy_(plane[source])


def _plane(pool: PoolShape, heads: int, features: int) -> Tensor:
    shape = (pool.num_blocks, pool.page_size, heads, features)
    plane = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    plane[NULL_BLOCK] = 0
    return plane
