"""Move vectors by a given distance in given directions, on the grid of their dtype.

y + n is rounded: where n is small beside the spacing of the numbers around y, most of it vanishes
or becomes a whole step. |round(y + s·n) − y| never falls as s grows, in no coordinate, so the s at
which the distance is the wanted one is found by halving. What is left is the step of the coordinate
that jumps there: on 256 coordinates below 2 % of the distance for 9 tokens in 10 even where it is
made of five such steps, and below 0.5 % over 64 tokens.
"""

import torch
from torch import Tensor

__all__ = ["displaced"]

_CLOSE = 1e-3
"""Relative to the distance: nearer than this isn't looked for."""
_DOUBLINGS, _HALVINGS = 64, 20
_ROWS_BYTES = 1 << 26
"""Of the vectors that are moved at once, in float64."""


def displaced(y: Tensor, direction: Tensor, distance: Tensor) -> Tensor:
    """Return y [..., D] moved along `direction` [..., D] by `distance` [...], in y's dtype.

    A distance of 0 changes nothing.
    """
    width = y.shape[-1]
    each = y.reshape(-1, width), direction.reshape(-1, width), distance.double().reshape(-1, 1)
    rows = max(1, _ROWS_BYTES // (8 * width))
    pieces = (torch.split(tensor, rows) for tensor in each)
    found = [_moved(*piece) for piece in zip(*pieces, strict=True)]
    return torch.cat(found).view(y.shape)


def _moved(y: Tensor, direction: Tensor, distance: Tensor) -> Tensor:
    wide, unit = y.double(), direction.double()
    unit = unit / torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    plain: Tensor = (wide + distance * unit).to(y.dtype)
    off = (_distance(plain, wide) - distance).abs() > _CLOSE * distance
    rest = off.flatten().nonzero().flatten()
    if len(rest):
        plain[rest] = _searched(wide[rest], unit[rest], distance[rest], y.dtype)
    return plain


def _searched(wide: Tensor, unit: Tensor, distance: Tensor, dtype: torch.dtype) -> Tensor:
    def moved(by: Tensor) -> Tensor:
        return (wide + by * unit).to(dtype)

    low, high = torch.zeros_like(distance), distance.clone()
    for _ in range(_DOUBLINGS):
        short = _distance(moved(high), wide) < distance
        if not bool(short.any()):
            break
        low, high = torch.where(short, high, low), torch.where(short, 2 * high, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        short = _distance(moved(middle), wide) < distance
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    under, over = moved(low), moved(high)
    nearer = distance - _distance(under, wide) < _distance(over, wide) - distance
    return torch.where(nearer, under, over)


def _distance(one: Tensor, wide: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(one.double() - wide, dim=-1, keepdim=True)
    return found
