"""A flat batch for attention: which head rows each group of queries reads, and what it may see.

Rows of a batch lie behind each other, T tokens of all requests. Queries of a decode (one per
request) are put together into padded groups, so that a layer costs one call and not one per
request; a chunk of a prompt is a group of its own. A group is padded to its longest text, so texts
that are less than half as long go into another one: at most half of what is read is padding.

What a query at position t sees: the keys t − window + 1 … t. Keys that no query of a group sees
aren't read. Everything but the mask depends on positions and slots alone and is made once a step,
for all layers of one window and one number of heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

__all__ = ["Layout", "Part", "TextRow", "decode_groups"]

_FEW = 64
"""Texts up to so many keys are put together whatever their lengths."""


@dataclass(frozen=True, slots=True)
class TextRow:
    """A request's queries in a batch: positions start … start + count − 1."""

    start: int
    count: int
    slots: Tensor
    """int64 [start + count], of all its tokens on the CPU; −1 where a window dropped the page."""


class Part(NamedTuple):
    """A group of queries and the keys they read."""

    tokens: Tensor
    """int64 [B · Tq], their places in the flat batch, request after request."""
    size: int
    """B."""
    head_rows: Tensor
    """int64 [B, Hkv, S]; padding is slot 0."""
    mask: Tensor | None
    """[B, 1, Tq, S], 0 where a key is seen and −∞ elsewhere; None: all, or `causal`."""
    causal: bool
    """Query i sees the keys up to i: a text from its beginning, without a window."""


@dataclass(slots=True)
class Layout:
    """The rows of one step. Parts are made when a layer first asks for them."""

    rows: Sequence[TextRow]
    dtype: torch.dtype
    device: torch.device
    _made: dict[tuple[int | None, int], list[Part]] = field(default_factory=dict)

    @property
    def positions(self) -> Tensor:
        """Position of each token, int64 [T]."""
        spans = [torch.arange(row.start, row.start + row.count) for row in self.rows]
        return torch.cat(spans).to(self.device)

    @property
    def slots(self) -> Tensor:
        """Where each token's keys and values go, int64 [T]."""
        return torch.cat([row.slots[row.start :] for row in self.rows]).to(self.device)

    def parts(self, window: int | None, heads: int) -> list[Part]:
        """Return the groups for layers of this window and so many heads of keys."""
        key = (window, heads)
        if key not in self._made:
            self._made[key] = self._parts(window, heads)
        return self._made[key]

    def _parts(self, window: int | None, heads: int) -> list[Part]:
        firsts, first = list[int](), 0
        for row in self.rows:
            firsts.append(first)
            first += row.count
        single = [number for number, row in enumerate(self.rows) if row.count == 1]
        seen = [self.rows[n].start + 1 - _begin(self.rows[n], window) for n in single]
        parts = [
            self._decode([single[i] for i in group], firsts, window, heads)
            for group in decode_groups(seen)
        ]
        longer = [number for number, row in enumerate(self.rows) if row.count > 1]
        return parts + [self._prefill(n, firsts[n], window, heads) for n in longer]

    def _decode(
        self, numbers: Sequence[int], firsts: Sequence[int], window: int | None, heads: int
    ) -> Part:
        rows = [self.rows[number] for number in numbers]
        slots = [row.slots[_begin(row, window) :] for row in rows]
        lengths = torch.tensor([len(one) for one in slots])
        padded = pad_sequence(slots, batch_first=True)
        mask = None
        if int(lengths.min()) < padded.shape[1]:
            unseen = torch.arange(padded.shape[1]) >= lengths[:, None]
            mask = _mask(~unseen, self.dtype)[:, None, None].to(self.device)
        tokens = torch.tensor([firsts[number] for number in numbers])
        return self._part(tokens, padded, heads, mask, causal=False)

    def _prefill(self, number: int, first: int, window: int | None, heads: int) -> Part:
        row = self.rows[number]
        begin = _begin(row, window)
        keys = torch.arange(begin, row.start + row.count)
        own = torch.arange(row.start, row.start + row.count)[:, None]
        seen = keys <= own
        if window is not None:
            seen &= keys > own - window
        causal = row.start == 0 and (window is None or window >= row.count)
        mask = None if causal else _mask(seen, self.dtype)[None, None].to(self.device)
        tokens = torch.arange(first, first + row.count)
        return self._part(tokens, row.slots[begin:][None], heads, mask, causal=causal)

    def _part(
        self, tokens: Tensor, slots: Tensor, heads: int, mask: Tensor | None, *, causal: bool
    ) -> Part:
        if int(slots.min()) < 0:
            raise AssertionError("a page that is still seen was dropped.")
        head_rows = slots[:, None] * heads + torch.arange(heads)[:, None]
        on = self.device
        return Part(tokens.to(on), len(slots), head_rows.contiguous().to(on), mask, causal)


def decode_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Return indices of texts that are padded together, each once, ascending in their group.

    All of a group are at least half as long as its longest, unless that is short.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups = list[list[int]]()
    for index in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (2 * lengths[index] >= longest or longest <= _FEW):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


def _begin(row: TextRow, window: int | None) -> int:
    """Return the first position that the row's first query sees."""
    return 0 if window is None else max(0, row.start - window + 1)


def _mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
