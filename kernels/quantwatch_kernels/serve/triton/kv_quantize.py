"""A cache's rows as packed codes: one program a row and group, by the rule of `qparams`.

Scales are rounded to 16 bits before codes are made of them, raised by one step where an end of the
range would lie more than half a code outside, and 1 for a group of zeros; a group that isn't finite
has scale NaN and codes of 0. Whether 16 bits hold every scale is told, so that the caller can ask
again with 32: the same rule for the whole tensor as everywhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.quantize.recipe import WeightSpec
from quantwatch_kernels.quantize.triton.codes import nearest

__all__ = ["kv_quantize_triton"]


@triton.jit
def _zero(low, scale, QMAX: tl.constexpr):
    exact = tl.div_rn(-low, scale)
    exact = tl.where(exact == exact, exact, 0.0)
    return nearest(tl.minimum(tl.maximum(exact, -1.0), QMAX + 1.0))


@triton.jit
def _codes(x, at, inside, scale, zero, QMIN: tl.constexpr, QMAX: tl.constexpr):
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    exact = tl.div_rn(values, scale)
    steps = nearest(tl.minimum(tl.maximum(exact, -1000.0), 1000.0)) + zero
    steps = tl.where(exact == exact, steps, 0.0)
    return tl.minimum(tl.maximum(steps, QMIN), QMAX).to(tl.int32)


@triton.jit
def _kv_quantize(
    x, packed, scales, zeros, fits, K, G, BYTES, x_m, x_k, GROUP: tl.constexpr,
    BITS: tl.constexpr, SIGNED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    QMIN: tl.constexpr, QMAX: tl.constexpr,
):  # fmt: skip
    m, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = g * GROUP
    last = tl.minimum(first + GROUP, K)
    k = first + tl.arange(0, BLOCK)
    values = tl.load(x + m * x_m + k * x_k, mask=k < last, other=0.0).to(tl.float32)
    finite = tl.min(tl.where(tl.abs(values) < float("inf"), 1, 0), axis=0) > 0
    # Both rules let a range hold 0, which is what lanes beyond the end are.
    low, high = tl.minimum(tl.min(values, axis=0), 0.0), tl.maximum(tl.max(values, axis=0), 0.0)
    if SIGNED:
        width = tl.div_rn(tl.maximum(-low, high), QMAX * 1.0)
    else:
        width = tl.div_rn(high, QMAX * 1.0) - tl.div_rn(low, QMAX * 1.0)
    width = tl.where(width == 0.0, 1.0, width)
    width = tl.where(finite, width, float("nan"))
    scale = width
    if HALF:
        bad = (width < 6.103515625e-05) | (width > 65504.0)
        tl.store(fits + m * G + g, tl.where(bad, 0, 1).to(tl.int8))
        stored = tl.where(width > 65504.0, 65504.0, width).to(tl.float16)
        scale = stored.to(tl.float32)
        scale = tl.where(scale == 0.0, 1.0, scale)
    zero = width * 0.0
    if not SIGNED:
        zero = tl.minimum(tl.maximum(_zero(low, scale, QMAX), 0.0), QMAX * 1.0)
        if HALF:
            above = tl.div_rn(high, scale) + zero > QMAX + 0.5
            outside = (tl.div_rn(low, scale) + zero < -0.5) | above
            up = (scale.to(tl.float16).to(tl.int16, bitcast=True) + 1).to(tl.int16)
            raised = up.to(tl.float16, bitcast=True).to(tl.float32)
            raised = tl.where(raised < float("inf"), raised, scale)
            scale = tl.where(outside, raised, scale)
            zero = tl.minimum(tl.maximum(_zero(low, scale, QMAX), 0.0), QMAX * 1.0)
        tl.store(zeros + m * G + g, zero.to(tl.int32).to(tl.uint8))
    tl.store(scales + m * G + g, scale.to(scales.dtype.element_ty))
    if BITS == 4:
        pair = tl.arange(0, BLOCK // 2)
        even, odd = first + 2 * pair, first + 2 * pair + 1
        row = m * x_m
        lower = _codes(x, row + even * x_k, even < last, scale, zero, QMIN, QMAX) & 15
        upper = _codes(x, row + odd * x_k, odd < last, scale, zero, QMIN, QMAX) & 15
        upper = tl.where(odd < last, upper, 0)
        byte = (lower | (upper << 4)).to(tl.uint8)
        tl.store(packed + m * BYTES + first // 2 + pair, byte, mask=even < last)
    else:
        code = _codes(x, m * x_m + k * x_k, k < last, scale, zero, QMIN, QMAX) & 255
        tl.store(packed + m * BYTES + k, code.to(tl.uint8), mask=k < last)


def kv_quantize_triton(x_MK: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return packed uint8 codes [M, bytes], scales [M, G], and uint8 zeros [M, G] or None."""
    packed, scales, zeros, fits = _run(x_MK, spec, spec.scale_dtype)
    if spec.scale_dtype == torch.float16 and not bool(fits.all()):
        packed, scales, zeros, _ = _run(x_MK, spec, torch.float32)
    return packed, scales, None if spec.zero == "none" else zeros


def _run(
    x_MK: Tensor, spec: WeightSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x_MK.shape
    fmt = spec.format
    group = min(columns, spec.granularity.group_size(columns))
    groups, width = -(-columns // group), (columns * fmt.bits + 7) // 8
    packed = torch.empty(rows, width, dtype=torch.uint8, device=x_MK.device)
    scales = torch.empty(rows, groups, dtype=dtype, device=x_MK.device)
    zeros = torch.empty(rows, groups, dtype=torch.uint8, device=x_MK.device)
    fits = torch.empty(rows, groups, dtype=torch.int8, device=x_MK.device)
    if rows:
        _kv_quantize[rows, groups](
            x_MK, packed, scales, zeros, fits, columns, groups, width, *x_MK.stride(),
            GROUP=group, BITS=fmt.bits, SIGNED=spec.zero == "none", HALF=dtype == torch.float16,
            BLOCK=max(16, triton.next_power_of_2(group)), QMIN=fmt.qmin, QMAX=fmt.qmax,
            enable_fp_fusion=False,
        )  # fmt: skip
    return packed, scales, zeros, fits
