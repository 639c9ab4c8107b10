"""Facts about floating-point formats that the statistics and the tests need."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

__all__ = ["fit_polynomial", "horner", "relative_rmse", "spacing"]


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance from |x| to the next larger number of `dtype`, as float64.

    For |x| in [2^e, 2^(e+1)) that is eps·2^e, and the smallest subnormal near zero. NaN and
    infinities have spacing NaN.
    """
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.double().abs().clamp_min(info.smallest_normal))
    step = torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)
    return torch.where(torch.isfinite(x), step, torch.nan)


def relative_rmse(actual: Tensor, expected: Tensor) -> float:
    """Return ‖actual − expected‖ ÷ ‖expected‖ in float64; 0 when both are zero."""
    difference = torch.linalg.vector_norm(actual.double() - expected.double()).item()
    norm = torch.linalg.vector_norm(expected.double()).item()
    return difference / norm if norm else (0.0 if difference == 0 else float("inf"))


def fit_polynomial(
    function: Callable[[np.ndarray], np.ndarray], bound: float, degree: int
) -> tuple[float, ...]:
    """Fit `function` on [−bound, bound] by interpolation in Chebyshev nodes, nearly minimax.

    Returns the coefficients of 1, x, x², …. An odd degree keeps 0 from being a node, so that
    quotients like (eˣ − 1)/x need no special case.
    """
    if degree % 2 == 0:
        raise ValueError(f"degree must be odd so that 0 is not a node; it is {degree}.")
    fit = np.polynomial.Chebyshev.interpolate(function, degree, domain=[-bound, bound])
    polynomial = fit.convert(kind=np.polynomial.Polynomial, domain=[-1, 1])
    return tuple(float(coefficient) for coefficient in polynomial.coef)


def horner(coefficients: tuple[Tensor, ...], x: Tensor, out: Tensor) -> Tensor:
    """Evaluate Σ cₖ·xᵏ into `out`; `coefficients` are 0-dimensional, at least two, of x's dtype."""
    *lower, highest = coefficients
    torch.add(lower.pop(), x, alpha=highest.item(), out=out)
    while lower:
        torch.addcmul(lower.pop(), out, x, out=out)
    return out
