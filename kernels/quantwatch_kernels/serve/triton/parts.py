"""What several kernels compute with: an exponential and a hyperbolic tangent.

`tl.exp` becomes one product and an approximate 2^x on a GPU, whose error grows with the argument;
here the whole part is split off first, so that the rest is below 0.35. There is no `tanh` outside
libdevice, which the interpreter lacks.
"""

import triton
import triton.language as tl

__all__ = ["exponential", "hyperbolic_tangent"]


@triton.jit
def exponential(x):
    """eˣ: 0 below −104, infinite above 87.9, NaN for NaN."""
    y = tl.minimum(tl.maximum(x, -104.0), 87.9)
    whole = tl.floor(y * 1.4426950408889634 + 0.5)
    rest = (y - whole * 0.693359375) + whole * 2.12194440e-4  # ln 2 in two parts
    found = tl.where(x > 87.9, float("inf"), tl.exp2(whole) * tl.exp(rest))
    return tl.where(x == x, found, x)


@triton.jit
def hyperbolic_tangent(x):
    """tanh(x); a polynomial near 0, where 1 − 2 ÷ (e²ˣ + 1) would cancel."""
    far = 1.0 - tl.div_rn(2.0, exponential(2.0 * x) + 1.0)
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.15, near, far)
