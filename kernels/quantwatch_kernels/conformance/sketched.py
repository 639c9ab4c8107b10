"""Inputs and twin of the sums of an estimate: the formulas of `sketch_estimate.py` as they stand.

Differences of a third of a nat cost the plain formulas no digits in float64; what tiny and huge
ones do to the back ends is tested apart (tests/kernels/compare/test_sketch_sums.py).
"""

import torch
from torch import Tensor

from quantwatch_kernels.compare.sketch import Sketch
from quantwatch_kernels.compare.sketch_sums import SUMS
from quantwatch_kernels.conformance.case import Ask, Made, OpCase, scale_of

__all__ = ["sketch_cases"]

_SHAPES = ((1, 16), (7, 33), (3, 160), (2, 1041))
"""(rows, ids): half of them kept, the others drawn."""
_TAIL = 0.3


def sketch_cases() -> tuple[OpCase, ...]:
    """Return the case of the sums."""
    return (OpCase(SUMS, "", _sums, lambda _b, _d: 1e-11, _SHAPES, dtypes=(torch.float32,)),)


def _sums(ask: Ask) -> Made:
    rows, count = ask.shape
    kept = count // 2
    old, drift = ask.randn(*ask.shape, seed=3), ask.randn(*ask.shape, seed=4)
    z = old + 0.3 * drift
    # The kept ids and the tail have a mass of 1, as a reference's have.
    total = old[:, :kept].double().logsumexp(-1) - torch.log1p(torch.tensor(-_TAIL).double())
    tail = torch.full((rows,), _TAIL, dtype=torch.float64, device=ask.device)
    ids = torch.arange(count, device=ask.device).expand(rows, -1).int()
    digest = torch.zeros(rows, dtype=torch.int64, device=ask.device)
    sketch = Sketch(ids, old, total, tail, digest, kept, 10 * count)
    values = _twin(old.double(), z.double(), total, kept)
    return Made((z, sketch), values, tuple(map(scale_of, values)))


def _twin(old: Tensor, z: Tensor, total: Tensor, kept: int) -> tuple[Tensor, ...]:
    delta, draws = z - old, old.shape[1] - kept
    p = (old[:, :kept] - total[:, None]).exp()
    mass = p.sum(-1) + _TAIL
    p, rho = p / mass[:, None], _TAIL / mass
    drawn = delta[:, kept:]
    growth = (p * delta[:, :kept].exp()).sum(-1) + rho * drawn.exp().mean(-1)
    mean = (p * delta[:, :kept]).sum(-1) + rho * drawn.mean(-1)
    y = drawn.exp() / growth[:, None]
    kl = growth.log() - mean + rho**2 * y.var(-1) / (2 * draws)
    error = rho * (y - drawn).std(-1) / draws**0.5
    top = delta[:, :5].abs()
    no = torch.zeros(len(old), dtype=torch.bool, device=old.device)
    return kl, error, top.mean(-1), top[:, :3].mean(-1), no, no, no
