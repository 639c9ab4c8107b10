"""Two rows of logits compared in float64: the twin of the fast sums, and their fallback.

Where δ = ln p − ln q is finite it is taken from centred differences (see `divergence.py`): even
float64 loses a KL of 5e-13 in ln p − ln q, whose terms are near 10 with 1e-15 of rounding each.
Elsewhere log-sum-exp with the conventions 0·ln(0/q) = 0, p·ln(p/0) = +∞; −∞ in both logits is 0.

Rows without a distribution (NaN, +∞, or nothing but −∞) are NaN. n rows, V ids.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quantwatch_kernels.registry import Fallback, record_fallback

__all__ = ["Exact", "compare_exactly", "redo_exactly"]

_TAME = 300.0
"""Largest centred difference whose exponential, and that times a probability, float64 can hold."""

_ROWS_AT_A_TIME = 8
"""A row of 49,152 ids takes 5 MB while it is compared."""


class Exact(NamedTuple):
    """Everything two distributions have in common. Sums float64 [n], the rest float64 [n, V]."""

    kl: Tensor
    reverse: Tensor
    js: Tensor
    tv: Tensor
    log_p: Tensor
    log_q: Tensor
    log_ratio: Tensor


def _excess(x: Tensor) -> Tensor:
    """Return e^(−x) − 1 + x, by its series where the terms cancel."""
    series = x * x * (1 / 2 - x * (1 / 6 - x * (1 / 24 - x * (1 / 120 - x / 720))))
    return torch.where(x.abs() < 1e-2, series, torch.expm1(-x) + x)


def _tame(log_p: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """Sum by centred differences: every summand of every sum is non-negative."""
    p = log_p.exp()
    kl = torch.log1p((p * _excess(d)).sum(-1))
    ratio = d + kl.unsqueeze(-1)
    growth = torch.expm1(-ratio)
    q = p * torch.exp(-ratio)
    js = 0.25 * ((p + q) * _js_summand(ratio, growth)).sum(-1)
    return kl, (q * _excess(-ratio)).sum(-1), js, 0.5 * (p * growth.abs()).sum(-1), ratio


def _js_summand(ratio: Tensor, growth: Tensor) -> Tensor:
    """Return (1 + t)·ln(1 + t) + (1 − t)·ln(1 − t), t = (p − q)/(p + q) = tanh(ratio/2)."""
    t = torch.tanh(ratio / 2)
    p_over_middle = -torch.log1p(growth / 2)
    far = (1 + t) * p_over_middle + (1 - t) * (p_over_middle - ratio)
    return torch.where(ratio.abs() < 1, t * ratio + torch.log1p(-t * t), far)


def _expectation(p: Tensor, x: Tensor) -> Tensor:
    return torch.where(p > 0, p * x, 0.0).sum(-1)


def _wild(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, ...]:
    """Sum by log-sum-exp, zeros and infinities by convention."""
    p, q = log_p.exp(), log_q.exp()
    ratio = torch.where((log_p == -math.inf) & (log_q == -math.inf), 0.0, log_p - log_q)
    middle = torch.logaddexp(log_p, log_q) - math.log(2)
    js = 0.5 * (_expectation(p, log_p - middle) + _expectation(q, log_q - middle))
    tv = 0.5 * (p - q).abs().sum(-1)
    return _expectation(p, ratio), _expectation(q, -ratio), js, tv, ratio


def compare_exactly(z_ref_nV: Tensor, z_cand_nV: Tensor) -> Exact:
    """Compare rows of logits of any float dtype in float64. Slow: 4 ms per row of 49,152 ids."""
    z, z_cand = z_ref_nV.double(), z_cand_nV.double()
    log_p, log_q = z.log_softmax(-1), z_cand.log_softmax(-1)
    never = (z == -math.inf) & (z_cand == -math.inf)
    delta = torch.where(never, 0.0, z - z_cand)
    p = log_p.exp()
    # By the likeliest id first: when it has all the mass, what it differs by is all there is.
    delta = delta - delta.gather(-1, log_p.argmax(-1, keepdim=True))
    d = torch.where(never, 0.0, delta - (p * delta).sum(-1, keepdim=True))
    tame = (d.abs().amax(-1) <= _TAME) & torch.isfinite(log_p.amax(-1))
    defined = torch.isfinite(z.amax(-1)) & torch.isfinite(z_cand.amax(-1))
    kl, reverse, js, tv, ratio = (
        torch.where(defined if s.ndim == 1 else defined.unsqueeze(-1), s, torch.nan)
        for s in _choose(tame, _tame(log_p, d), _wild(log_p, log_q))
    )
    return Exact(kl, reverse, js, tv, log_p, log_q, ratio)


def _choose(
    tame_n: Tensor, tame: tuple[Tensor, ...], wild: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    pairs = zip(tame, wild, strict=True)
    return tuple(
        torch.where(tame_n if a.ndim == 1 else tame_n.unsqueeze(-1), a, b) for a, b in pairs
    )


def redo_exactly(
    op: str, z_ref_nV: Tensor, z_cand_nV: Tensor, failed_n: Tensor
) -> Iterator[tuple[Tensor, Exact]]:
    """Yield (row numbers, their exact comparison) of failed rows, a few at a time, counted.

    Rows without a distribution are left out: they are NaN and stay NaN.
    """
    for rows in torch.split(failed_n.nonzero().flatten(), _ROWS_AT_A_TIME):
        z, z_cand = z_ref_nV[rows], z_cand_nV[rows]
        defined = torch.isfinite(z.amax(-1)) & torch.isfinite(z_cand.amax(-1))
        if bool(defined.any()):
            _count(op, z[defined], z_cand[defined])
            yield rows[defined], compare_exactly(z[defined], z_cand[defined])


def _count(op: str, z_ref_nV: Tensor, z_cand_nV: Tensor) -> None:
    finite = (torch.isfinite(z_ref_nV) & torch.isfinite(z_cand_nV)).all(-1)
    num_finite = int(finite.sum())
    reasons = {
        "rows with infinite logits": len(finite) - num_finite,
        "rows out of float32's reach": num_finite,
    }
    for reason, count in reasons.items():
        if count:
            record_fallback(Fallback(op, "aten", "reference", reason), count)
