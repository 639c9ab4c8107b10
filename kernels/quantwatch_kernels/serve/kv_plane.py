"""How keys or values are stored as codes, as a value that fails on construction.

- per token: one scale per token, head and group of features. Flushed token by token.
- per channel (KIVI, 2402.02750): one scale per feature and `group` tokens, so that a feature that
  is large in every token has a scale of its own. Only whole groups are flushed.
- per chunk: one scale for all numbers of a head in a chunk of tokens; what "int8, one scale per
  tensor" becomes in a cache that grows.
- `center`: a chunk's mean of each feature is kept in float16 and taken off first. Keys have
  features that are large in every token: they set the scale of all the others.
- `hadamard`: the features of each head are rotated first, the query with them.
- `rank`: the rounding error of each flushed chunk and head is kept as a product of that rank (GEAR,
  2403.05527), in float16.
- `floats`: no codes at all, the numbers rounded to a 16-bit float: what everything is compared to.

Scales are 16 bits; asymmetric zero points are codes (4 bits for 4-bit codes), ranges are widened to
hold 0. Everything counts in `num_bits`.
"""

from dataclasses import dataclass, fields
from typing import Literal

import torch

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, WeightSpec

__all__ = ["CHUNK", "PlaneScheme"]

CHUNK = 64
"""Tokens that share a mean, a scale or a low-rank product, where nothing says otherwise."""


@dataclass(frozen=True, slots=True)
class PlaneScheme:
    """How keys or values are stored. Raises ValueError for what can't be."""

    bits: int
    per: Literal["token", "channel", "chunk"] = "token"
    group: int | None = None
    """per token: features that share a scale, None for all of a head; per channel: tokens."""
    symmetric: bool = False
    hadamard: bool = False
    center: bool = False
    """Take each feature's mean over a chunk of tokens off first; not per channel."""
    clip: Literal["none", "mse"] = "none"
    rank: int = 0
    chunk: int | None = None
    """Tokens that share a mean or a product; None: a group of tokens, or CHUNK."""
    floats: Literal["", "float16", "bfloat16"] = ""

    def __post_init__(self) -> None:
        if self.floats:
            if self.bits != 16 or any(getattr(self, name) != value for name, value in _PLAIN):
                raise ValueError(f"{self.floats} has 16 bits and no other option; not {self}.")
            return
        if not 2 <= self.bits <= 8:
            raise ValueError(f"codes have 2 … 8 bits; not {self.bits}.")
        if self.per == "channel" and (self.group is None or self.group < 2):
            # With one token a group every value is its own scale: a cache that stores nothing.
            raise ValueError(f"per channel needs groups of at least 2 tokens; not {self.group}.")
        if self.group is not None and self.group < 2:
            raise ValueError(f"a group has at least 2 features; not {self.group}.")
        if self.per == "chunk" and self.group is not None:
            raise ValueError(f"per chunk all of a head shares a scale; no groups of {self.group}.")
        if self.center and self.per == "channel":
            raise ValueError("center goes with scales per token: per channel each has its own.")
        if self.rank < 0:
            raise ValueError(f"a rank is 0 or more; not {self.rank}.")
        self._check_chunk()

    def _check_chunk(self) -> None:
        if self.chunk is None:
            return
        if not (self.rank or self.center or self.per == "chunk"):
            raise ValueError(f"nothing is shared by a chunk of {self.chunk} tokens.")
        if self.chunk < 2 or (self.per == "channel" and self.chunk % (self.group or 1)):
            raise ValueError(f"a chunk of {self.chunk} tokens is no whole groups of {self.group}.")

    @property
    def spec(self) -> WeightSpec:
        """The one definition of codes, for rows of features (per token) or of tokens."""
        fmt = INT_FORMATS[f"{'' if self.symmetric else 'u'}int{self.bits}"]
        granularity = PerChannel() if self.group is None else PerGroup(self.group)
        zero: Literal["none", "integer"] = "none" if self.symmetric else "integer"
        return WeightSpec(fmt, granularity, zero, self.clip, scale_dtype=torch.float16)

    @property
    def flush(self) -> int:
        """Tokens that are stored together."""
        if self.chunk is not None:
            return self.chunk
        if self.per == "channel":
            assert self.group is not None
            return self.group
        return CHUNK if self.rank or self.center or self.per == "chunk" else 1

    def shape(self, tokens: int, features: int) -> tuple[int, int]:
        """Return rows × columns of one head's codes of `tokens` flushed tokens."""
        if self.per == "channel":
            return features, tokens
        if self.per == "chunk":
            return tokens // self.flush, self.flush * features
        return tokens, features

    def num_bits(self, tokens: int, features: int) -> int:
        """Return the bits of `tokens` flushed tokens of one head, products included."""
        if self.floats:
            return 16 * tokens * features
        rows, columns = self.shape(tokens, features)
        groups = -(-columns // self.spec.granularity.group_size(columns)) if columns else 0
        codes = 8 * self.spec.format.num_bytes(rows, columns)
        zeros = 0 if self.symmetric else self.bits
        chunks = -(-tokens // self.flush)
        rank = min(self.rank, self.flush, features)
        products = 16 * rank * (tokens + chunks * features)
        means = 16 * chunks * features if self.center else 0
        return codes + rows * groups * (16 + zeros) + products + means


_PLAIN = tuple(
    (option.name, option.default)
    for option in fields(PlaneScheme)
    if option.name not in ("bits", "floats")
)
