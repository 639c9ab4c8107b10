"""KL, reverse KL, Jensen–Shannon and total variation of two rows of logits, right even when tiny.

The obvious log p − log q in float32 is wrong by 1 % at bfloat16-level drift and goes negative. Here
everything is written in the centred difference d, whose p-mean is zero, so that first-order terms
cancel on paper instead of in the rounding:

    δz = z − z'      m = Σ p·δz, rounded      d = δz − m      r = Σ p·d, what rounding left
    E = expm1(−d)    G = Σ p·(E + d), no term is negative     κ = log1p(G − r) = ln Σ p·e^(−d)
    KL(p‖q) = κ + r  ln(p/q) = d + κ =: δ                     E' = expm1(−δ) = E·e^(−κ) + expm1(−κ)
    KL(p‖q) + KL(q‖p) = Σ p·δ·(−E') = −e^(−κ)·Σ p·d·E − r·expm1(−κ)
    TV = ½ Σ p·|E'|
    JS = ½ [KL(q‖p) − Σ p·(2 + E')·log1p(E'/2)]

KL feels r only in second order, TV and JS in first: a peaked row's JS would be wrong by 1 %.

Two forms of the sums. The closed one is as above. E + d cancels when d is small, so chunks with
|d| ≤ 1 everywhere use polynomials for E + d and for the summand of JS, and so do rows whose
weighted drift is too small for the closed form. What float32 can't do (−inf, NaN, |d| > 60, a row
that has both a tiny drift and a large |d|, or a drift lost in the rounding of δz around a large
common shift) comes out as NaN and is done again in float64 by the twin in `exact.py`, counted as a
fallback.

R rows, V ids. Sums run in float32 over float32 products; what they are divided by is float64.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.numerics import fit_polynomial, horner

__all__ = ["Centred", "Sums", "centre", "divergences", "kl"]

SERIES_BOUND = 1.0
CLOSED_BOUND = 60.0
_MIN_KL_PER_DRIFT = 3e-3
"""Rounding moves Σ p·(E + d) by at most 2⁻²³·Σ p·|d|: below this ratio 1e-4 is not guaranteed."""
_JS_BOUND = 1.5  # |δ| ≤ 1 + KL, and KL ≤ 2²/8 by Hoeffding's lemma
_ROUNDING = 2.0**-24
_MAX_ERROR = 5e-5
"""Half of what a single row is promised to: the rest is for the sums."""
_BLOCK = 128


def _kl_summand(d: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((np.expm1(-d) + d) / d**2)


def _js_summand(x: NDArray[np.float64]) -> NDArray[np.float64]:
    t = np.tanh(x / 2)
    return np.asarray((1 + np.exp(-x)) / 4 * (np.log1p(-t * t) + t * x) / x**2)


def _coefficients(function: Callable[..., NDArray[np.float64]], bound: float) -> tuple[Tensor, ...]:
    """Fit to degree 7: relative error 5e-9 for KL and 1e-7 for JS, everywhere in the range."""
    return tuple(torch.tensor(c) for c in fit_polynomial(function, bound, 7))


_KL_SERIES = _coefficients(_kl_summand, SERIES_BOUND)
_JS_SERIES = _coefficients(_js_summand, _JS_BOUND)


class Centred(NamedTuple):
    """Rows ready to be summed. `p` sums to `mass` (near 1), not exactly to 1."""

    p: Tensor
    """float32 [R, V], scratch."""
    d: Tensor
    """float32 [R, V], scratch."""
    mass: Tensor
    """float64 [R]."""
    shift: Tensor
    """m as it was subtracted, float64 [R]."""
    largest: Tensor
    """max |d|, float32 [R]; NaN where the row has no centred form."""

    def take_mean(self, x_RV: Tensor) -> Tensor:
        """Return Σ p·x as float64 [R]; x, which must be scratch, is overwritten."""
        return _exact_sum(x_RV.mul_(self.p)) / self.mass

    def scratch(self, name: str) -> Tensor:
        """Return a buffer of the same shape."""
        return workspace.take_like(name, self.p)

    def select(self, mask_R: Tensor, into: str) -> "Centred":
        """Return the rows of a mask, copied to the scratch memory named `into`."""
        index, (_, width), device = mask_R.nonzero().flatten(), self.p.shape, self.p.device
        p, d = (workspace.take(f"{into} {n}", len(index), width, device) for n in "pd")
        torch.index_select(self.p, 0, index, out=p)
        torch.index_select(self.d, 0, index, out=d)
        return Centred(p, d, self.mass[index], self.shift[index], self.largest[index])


class Sums(NamedTuple):
    """The four divergences, and κ: ln(p/q) is δz − shift + κ. float64 [R]."""

    kl: Tensor
    reverse: Tensor
    js: Tensor
    tv: Tensor
    offset: Tensor


def _exact_sum(x_RV: Tensor) -> Tensor:
    """Sum rows with float32 partial sums of at most 128 terms, the rest in float64."""
    rows, width = x_RV.shape
    whole = width // _BLOCK * _BLOCK
    blocks = x_RV[:, :whole].view(rows, whole // _BLOCK, _BLOCK)
    total = blocks.sum(-1).sum(-1, dtype=torch.float64)
    return total if whole == width else total + x_RV[:, whole:].sum(-1).double()


def centre(z_ref_RV: Tensor, z_cand_RV: Tensor) -> Centred:
    """Prepare float32 logits. The result is this thread's scratch memory until the next call."""
    p, d, products = (workspace.take_like(n, z_ref_RV) for n in ("e", "delta", "x"))
    torch.softmax(z_ref_RV, -1, out=p)  # 30 % faster than exp; its own normaliser is off by 1e-5
    torch.sub(z_ref_RV, z_cand_RV, out=d)
    mass = _exact_sum(p)
    shift = _column(_exact_sum(torch.mul(p, d, out=products)) / mass)
    d.sub_(shift)
    largest = torch.maximum(d.amax(-1), -d.amin(-1))
    return Centred(p, d, mass, shift.flatten().double(), largest)


def _column(x_R: Tensor) -> Tensor:
    return x_R.float().unsqueeze(-1)


def _without_lost(c: Centred, g_R: Tensor) -> Tensor:
    """Make G NaN where rounding moves δz, by up to 2⁻²⁴·|m|, as far as matters beside d.

    KL then moves by Σ p·|d| times that; TV by it times the mass beside the likeliest id, since what
    all ids share is subtracted again.
    """
    unit = _ROUNDING * c.shift.abs()
    suspects = unit * math.sqrt(2) > _MAX_ERROR * g_R.sqrt()  # drift² ≤ 2·G: all rows that may be
    if not bool(suspects.any()):
        return g_R
    s, unit, g = c.select(suspects, "suspects"), unit[suspects], g_R[suspects]
    spread = unit * (1 - s.p.amax(-1).double() / s.mass)
    drift = s.take_mean(torch.abs(s.d, out=s.scratch("y")))
    lost = (unit * drift > _MAX_ERROR * g) | (2 * spread > _MAX_ERROR * drift)
    return g_R.masked_scatter(suspects, torch.where(lost, torch.nan, g))


def _series(c: Centred) -> tuple[Tensor, Tensor]:
    """Return G (NaN where it would not be exact) and, in scratch memory x, E + d."""
    square = torch.mul(c.d, c.d, out=c.scratch("y"))
    excess = horner(_KL_SERIES, c.d, c.scratch("x")).mul_(square)
    g_R = _exact_sum(torch.mul(c.p, excess, out=c.scratch("y"))) / c.mass
    return _without_lost(c, g_R), excess


def _closed(c: Centred) -> tuple[Tensor, Tensor]:
    """Return G (NaN where it would not be exact) and, in scratch memory x, E."""
    e = torch.neg(c.d, out=c.scratch("x")).expm1_()
    g_R = c.take_mean(torch.add(e, c.d, out=c.scratch("y")))
    if bool((g_R < 4 * _MIN_KL_PER_DRIFT**2).any()):  # larger ones pass: drift² ≤ 2.4·G
        drift = c.take_mean(torch.abs(c.d, out=c.scratch("y")))
        g_R = torch.where(g_R < _MIN_KL_PER_DRIFT * drift, torch.nan, g_R)
    return _without_lost(c, g_R), e


class _Common(NamedTuple):
    kl: Tensor
    reverse: Tensor
    tv: Tensor
    offset: Tensor


def _common(c: Centred, e: Tensor, g_R: Tensor) -> _Common:
    """Return everything but JS, given E and G. E stays as it is."""
    weighted = torch.mul(c.p, c.d, out=c.scratch("y"))
    rest = _exact_sum(weighted) / c.mass
    offset = torch.log1p(g_R - rest)
    kl_R, shrink = offset + rest, torch.exp(-offset)
    jeffreys = -shrink * _exact_sum(weighted.mul_(e)) / c.mass - rest * torch.expm1(-offset)
    gap = torch.sub(e, _column(torch.expm1(offset)), out=c.scratch("y")).abs_()
    reverse = jeffreys - kl_R  # never less than a 60th of the minuend while |d| ≤ 60
    tv = 0.5 * shrink * c.take_mean(gap)
    # Of a row that is sure of one id only r is left, to the rounding of that id's p·d.
    lost = _MAX_ERROR * tv < _ROUNDING**2 * c.shift.abs()
    return _Common(kl_R, reverse, tv.masked_fill(lost, torch.nan), offset)


def _sums_series(c: Centred) -> Tensor:
    g_R, excess = _series(c)
    s = _common(c, excess.sub_(c.d), g_R)
    ratio = c.d.add_(_column(s.offset))
    summand = horner(_JS_SERIES, ratio, c.scratch("x"))
    js = c.take_mean(summand.mul_(torch.mul(ratio, ratio, out=c.scratch("y"))))
    return torch.stack([s.kl, s.reverse, js, s.tv, s.offset])


def _sums_closed(c: Centred) -> Tensor:
    g_R, e = _closed(c)
    s = _common(c, e, g_R)
    growth = e.mul_(_column(torch.exp(-s.offset))).add_(_column(torch.expm1(-s.offset)))
    logs = torch.mul(growth, 0.5, out=c.scratch("y")).log1p_()
    js = 0.5 * (s.reverse - c.take_mean(growth.add_(2).mul_(logs)))
    return torch.stack([s.kl, s.reverse, js, s.tv, s.offset])


def _by_form(
    c: Centred, series: Callable[[Centred], Tensor], closed: Callable[[Centred], Tensor]
) -> Tensor:
    """Return [sums, R] by the form that suits, NaN where neither does."""
    small = c.largest <= SERIES_BOUND
    if bool(small.all()):
        return series(c)
    out = closed(c).masked_fill(~(c.largest <= CLOSED_BOUND), torch.nan)
    again = small & out.isnan().any(0)
    if bool(again.any()):
        out[:, again] = series(c.select(again, "again"))
    return out


def kl(c: Centred) -> Tensor:
    """Return KL(p‖q) as float64 [R], NaN for rows that need float64. Overwrites scratch memory."""
    return torch.log1p(_by_form(c, lambda s: _series(s)[0][None], lambda s: _closed(s)[0][None])[0])


def divergences(c: Centred) -> Sums:
    """Return all sums, NaN for rows that need float64. Overwrites scratch memory."""
    return Sums(*_by_form(c, _sums_series, _sums_closed))
