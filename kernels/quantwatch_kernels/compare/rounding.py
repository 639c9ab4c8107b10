"""The 16-bit factors of a lens that is faster than float32: what is rounded, and what is left.

bfloat16 keeps 8 significant bits of every factor. In 16-bit integers every 32 inputs x of a row, or
of an id's weights, have a step s of their own:

    b(x) = s q     q = nearest(x / s)     s = max(largest |x| / 32767, |x|₂ / 46330)

The second bound keeps a block's sum of products within 32 bits (Cauchy and Schwarz): sums are
exact. Where it decides, as it does unless a few inputs outweigh the rest, a factor is off by up to
1/16,000 of its block's root mean square. An input that outweighs the other 31 by far takes their
digits: b is then no better than bfloat16.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["BLOCK", "ROUNDINGS", "Factors", "Rounded"]

Rounded = Literal["bfloat16", "int16"]
"""The factors that aren't float32."""

Factors = Literal["float32", "bfloat16", "int16"]
"""In what a lens multiplies hidden states and head."""

BLOCK = 32
"""Inputs that share a step."""
_LARGEST, _NORM, _SMALLEST_STEP = 32767.0, 46330.0, 2.0**-120


def _bfloat16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _int16(x: Tensor) -> Tensor:
    width = x.shape[-1]
    padded = pad(x.float(), (0, -width % BLOCK))
    blocks = padded.view(*x.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)
    wide = blocks.double()
    largest = wide.abs().amax(-1, keepdim=True) / _LARGEST
    norm = wide.square().sum(-1, keepdim=True).sqrt() / _NORM
    step = torch.maximum(largest, norm).float().clamp_min(_SMALLEST_STEP)
    counts = torch.round(blocks * (1.0 / step))
    return (counts.double() * step).flatten(-2)[..., :width]


ROUNDINGS: Mapping[Rounded, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"bfloat16": _bfloat16, "int16": _int16}
)
"""float32 [..., H] → what its rounding leaves, exactly: in float32, of int16 in float64."""
