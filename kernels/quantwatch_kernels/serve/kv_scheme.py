"""How a KV cache is stored, as values that fail on construction.

A token's keys and values (heads H, features D each, keys after their rotary embedding) are kept in
full precision while the token is among the first `sinks` or the last `window`; what lies between is
stored as codes, `flush` tokens at a time, and never touched again (to quantize it anew at each
flush piles up errors, transformers#34189).

- per token: one scale per token, head and group of features. Flushed token by token.
- per channel (KIVI, 2402.02750): one scale per feature and `group` tokens, so that a feature that
  is large in every token has a scale of its own. Only whole groups are flushed.
- `center`: a chunk's mean of each feature is kept in float16 and taken off first. Keys have
  features that are large in every token: they set the scale of all the others.
- `hadamard`: the features of each head are rotated first, the query with them.
- `rank`: the rounding error of each flushed chunk and head is kept as a product of that rank (GEAR,
  2403.05527), in float16.

Scales are 16 bits; asymmetric zero points are codes (4 bits for 4-bit codes), ranges are widened to
hold 0. Everything counts in `bits_per_element`.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, WeightSpec

__all__ = ["SCHEMES", "KVScheme", "PlaneScheme", "scheme_named"]

CHUNK = 64
"""Tokens that share a mean or a low-rank product, where no group says otherwise."""


@dataclass(frozen=True, slots=True)
class PlaneScheme:
    """How keys or values are stored. Raises ValueError for what can't be."""

    bits: int
    per: Literal["token", "channel"] = "token"
    group: int | None = None
    """per token: features that share a scale, None for all of a head; per channel: tokens."""
    symmetric: bool = False
    hadamard: bool = False
    center: bool = False
    """Take each feature's mean over a chunk of tokens off first; per token only."""
    clip: Literal["none", "mse"] = "none"
    rank: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"codes have 2 … 8 bits; not {self.bits}.")
        if self.per == "channel" and (self.group is None or self.group < 2):
            # With one token a group every value is its own scale: a cache that stores nothing.
            raise ValueError(f"per channel needs groups of at least 2 tokens; not {self.group}.")
        if self.group is not None and self.group < 2:
            raise ValueError(f"a group has at least 2 features; not {self.group}.")
        if self.center and self.per == "channel":
            raise ValueError("center goes with scales per token: per channel each has its own.")
        if self.rank < 0:
            raise ValueError(f"a rank is 0 or more; not {self.rank}.")

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
        if self.per == "channel":
            assert self.group is not None
            return self.group
        return CHUNK if self.rank or self.center else 1

    def num_bits(self, tokens: int, features: int) -> int:
        """Return the bits of `tokens` flushed tokens of one head, products included."""
        rows, columns = (tokens, features) if self.per == "token" else (features, tokens)
        groups = -(-columns // self.spec.granularity.group_size(columns)) if columns else 0
        codes = 8 * self.spec.format.num_bytes(rows, columns)
        zeros = 0 if self.symmetric else self.bits
        chunks = -(-tokens // self.flush)
        rank = min(self.rank, self.flush, features)
        products = 16 * rank * (tokens + chunks * features)
        means = 16 * chunks * features if self.center else 0
        return codes + rows * groups * (16 + zeros) + products + means


@dataclass(frozen=True, slots=True)
class KVScheme:
    """How both are stored, and which tokens and layers are not. Raises ValueError as it is made."""

    keys: PlaneScheme
    values: PlaneScheme
    sinks: int = 0
    """First tokens of a sequence in full precision: attention gathers there."""
    window: int = 0
    """At least so many of the newest tokens in full precision."""
    high_layers: tuple[int, ...] = field(default=())
    """Layers whose cache stays in full precision."""

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 0:
            raise ValueError(
                f"sinks and window are numbers of tokens; not {self.sinks} and {self.window}."
            )
        if self.keys.flush % self.values.flush and self.values.flush % self.keys.flush:
            raise ValueError(
                f"keys are flushed by {self.keys.flush} tokens and values by {self.values.flush}: "
                "one must be a multiple of the other."
            )

    @property
    def flush(self) -> int:
        """Tokens that are flushed together."""
        return max(self.keys.flush, self.values.flush)

    def stored_end(self, tokens: int) -> int:
        """Return the end of what is stored as codes, from `sinks` on, of a sequence of `tokens`."""
        between = tokens - self.sinks - self.window
        return self.sinks + max(between, 0) // self.flush * self.flush

    def bits_per_element(self, tokens: int, features: int) -> float:
        """Return bits per cached number of a layer that isn't high, full precision as 16 bits."""
        stored = self.stored_end(tokens) - self.sinks if tokens > self.sinks else 0
        kept = tokens - stored
        coded = sum(plane.num_bits(stored, features) for plane in (self.keys, self.values))
        return (coded + 2 * 16 * kept * features) / (2 * tokens * features)


def _both(plane: PlaneScheme, sinks: int = 0, window: int = 0) -> KVScheme:
    return KVScheme(plane, plane, sinks, window)


def _kivi(bits: int, rank: int = 0, window: int = 0) -> KVScheme:
    keys = PlaneScheme(bits, "channel", 32, rank=rank)
    return KVScheme(keys, PlaneScheme(bits, "token", 32, rank=rank), window=window)


_HADAMARD4 = PlaneScheme(4, group=32, hadamard=True, clip="mse")
_KEYS2 = PlaneScheme(2, "channel", 32, clip="mse", rank=4)
_VALUES2 = PlaneScheme(2, "token", 32, hadamard=True, clip="mse", rank=4)
SCHEMES: dict[str, KVScheme] = {
    "int8": _both(PlaneScheme(8, hadamard=True)),
    "int8-centered": KVScheme(
        PlaneScheme(8, hadamard=True, center=True), PlaneScheme(8, hadamard=True)
    ),
    "int8-symmetric": _both(PlaneScheme(8, symmetric=True)),
    "int8-plain": _both(PlaneScheme(8)),
    "kivi8": _kivi(8),
    "int4-symmetric": _both(PlaneScheme(4, symmetric=True)),
    "int4-plain": _both(PlaneScheme(4)),
    "int4-g32": _both(PlaneScheme(4, group=32)),
    "int4-hadamard": _both(PlaneScheme(4, hadamard=True)),
    "int4": _both(_HADAMARD4),
    "int4-centered": KVScheme(replace(_HADAMARD4, center=True), _HADAMARD4),
    "int4-window": _both(_HADAMARD4, sinks=4, window=32),
    "kivi4": _kivi(4),
    "kivi4-window": _kivi(4, window=32),
    "kivi4-r4": _kivi(4, rank=4),
    "kivi2": _kivi(2),
    "kivi2-r4": _kivi(2, rank=4),
    "int2": KVScheme(_KEYS2, _VALUES2, sinks=4, window=32),
    "int2-plain": _both(PlaneScheme(2)),
}
"""By name, as a check or a table says it; what each costs is in docs/kernels.md."""


def scheme_named(name: str) -> KVScheme:
    """Return a scheme, `NAME` or `NAME+high0,1` with layers in full precision.

    Raises ValueError naming what is allowed.
    """
    base, _, rest = name.partition("+")
    if base not in SCHEMES:
        raise ValueError(f"unknown KV scheme {name!r}; allowed are {', '.join(SCHEMES)}.")
    if not rest:
        return SCHEMES[base]
    numbers = rest.removeprefix("high").split(",")
    if not rest.startswith("high") or not all(number.isdigit() for number in numbers):
        raise ValueError(f"unknown KV scheme {name!r}; after + comes highN,M…, e.g. {base}+high0.")
    return replace(SCHEMES[base], high_layers=tuple(sorted({int(n) for n in numbers})))
