"""Int8 codes of a row inside a kernel: the rules of `row_codes`, bit for bit, said once.

A kernel walks over its row twice: first `seen` notes the magnitudes block by block, then
`row_scale` makes the scale of them and `codes_of` the codes. Division is rounded to nearest (`/` is
2 ulp off on a GPU), halves go to even, and steps are clamped before the cast (a GPU may saturate
where others wrap).
"""

import triton
import triton.language as tl

__all__ = ["codes_of", "nearest", "row_scale", "seen"]


@triton.jit
def nearest(steps):
    """Round |steps| < 2²² half to even: `rint` is in libdevice, which the interpreter lacks."""
    return (steps + 12582912.0) - 12582912.0


@triton.jit
def seen(values, inside, largest, bad):
    """Note a block of float32 values; lanes that aren't `inside` the row count for nothing."""
    size = tl.abs(values)
    finite = size < float("inf")  # false for NaN, too
    bad = tl.maximum(bad, tl.where(finite | ~inside, 0, 1))
    largest = tl.maximum(largest, tl.where(finite & inside, size, 0.0))
    return largest, bad


@triton.jit
def row_scale(largest, bad):
    """Return absmax ÷ 127, 1 for a row of zeros, and whether the row holds a NaN or an infinity."""
    damaged = tl.max(bad, axis=0) > 0
    scale = tl.div_rn(tl.max(largest, axis=0), 127.0)
    return tl.where(scale == 0.0, 1.0, scale), damaged


@triton.jit
def codes_of(values, scale, damaged):
    """Return int8 codes of float32 values; zeros for a damaged row."""
    steps = tl.div_rn(tl.where(damaged, 0.0, values), scale)
    return nearest(tl.minimum(tl.maximum(steps, -127.0), 127.0)).to(tl.int8)
