"""Hadamard rotation of rows: x·D·H/√n with H = Sylvester(P) ⊗ R(Q), n = P·Q, per block.

A block of a row is a matrix X [P, Q], and its rotation S·X·R: two small products in one program.
S is not stored, its sign at (i, j) is the parity of the bits of i & j; R [Q, Q] holds the base that
is no power of two (36 of 576, 12 of 1536). What is smaller than the 16 that `tl.dot` needs is
filled up with zeros. Products are float32.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.quantize.hadamard import Hadamard, hadamard_base, hadamard_matrix
from quantwatch_kernels.quantize.triton.limits import split_order

__all__ = ["hadamard_triton"]


@triton.jit
def _rotate(
    x, y, signs, right, scale, width, stride_m, stride_k,
    P: tl.constexpr, Q: tl.constexpr, PADDED_P: tl.constexpr, PADDED_Q: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * P * Q
    p, q = tl.arange(0, PADDED_P), tl.arange(0, PADDED_Q)
    inside = (p[:, None] < P) & (q[None, :] < Q)
    k = first + p[:, None] * Q + q[None, :]
    block = tl.load(x + row * stride_m + k * stride_k, mask=inside, other=0.0).to(tl.float32)
    block *= tl.load(signs + k, mask=inside, other=0).to(tl.float32)
    shared = p[:, None] & p[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    left = (1 - 2 * (shared & 1)).to(tl.float32)
    both = (q[:, None] < Q) & (q[None, :] < Q)
    factor = tl.load(right + q[:, None] * Q + q[None, :], mask=both, other=0).to(tl.float32)
    mixed = tl.dot(left, block, input_precision="ieee")
    mixed = tl.dot(mixed, factor, input_precision="ieee") * scale
    tl.store(y + row * width + k, mixed.to(y.dtype.element_ty), mask=inside)


@cache
def _right(order: int, device: torch.device) -> Tensor:
    return hadamard_matrix(order).to(device)


def hadamard_triton(x_MK: Tensor, rotation: Hadamard) -> Tensor:
    """Rotate the rows of a matrix of any strides, in its dtype."""
    rows, width = x_MK.shape
    y = torch.empty(rows, width, dtype=x_MK.dtype, device=x_MK.device)
    if not y.numel():
        return y
    P, Q = split_order(rotation.block, hadamard_base(rotation.block))
    _rotate[rows, width // rotation.block](
        x_MK, y, rotation.signs, _right(Q, x_MK.device), 1 / math.sqrt(rotation.block), width,
        *x_MK.stride(), P=P, Q=Q, PADDED_P=max(16, P), PADDED_Q=max(16, triton.next_power_of_2(Q)),
        enable_fp_fusion=True,
    )  # fmt: skip
    return y
