"""Experts' products over a plan of blocks: one program a block of one expert's rows, and outputs.

W4A16, W8A16: steps (code − zero) are whole numbers below 256, exact in every float dtype, so they
are multiplied as they are, summed in float32 within a group, and each group's sum is scaled. W4A4,
W8A8: rows are codes already (less their zeros), sums are int32, scaled per group by both scales.
Rows are read where they lie, through the plan's slots; a block's padding and slots on other devices
are neither read nor written.
"""

import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.serve.moe_align import BlockPlan
from quantwatch_kernels.serve.moe_experts import ExpertStack

__all__ = ["Rows", "moe_gemm_triton"]

Rows = tuple[Tensor, Tensor | None, int]
"""Rows [R, K] as numbers or int8 codes, scales [R, G] of codes, inputs that share a scale."""


@triton.jit
def _steps(
    packed, zeros, expert, n, k, N, G, BYTES, inside, group,
    BITS: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """Return code − zero as int32 [BLOCK_K, BLOCK_N]."""
    row = (expert * N + n)[None, :]
    if BITS == 4:
        byte = tl.load(packed + row * BYTES + (k // 2)[:, None], mask=inside, other=0).to(tl.int32)
        code = (byte >> ((k % 2) * 4)[:, None]) & 15
    else:
        code = tl.load(packed + row * BYTES + k[:, None], mask=inside, other=0).to(tl.int32)
    if SIGNED:
        return code - tl.where(code >= (1 << (BITS - 1)), 1 << BITS, 0)
    zero = tl.load(zeros + (expert * N + n) * G + group, mask=n < N, other=0).to(tl.int32)
    return tl.where(inside, code - zero[None, :], 0)


@triton.jit
def _moe_gemm(
    x, packed, y, scales, zeros, row_scales, slots, experts, N, K, G, G_X, BYTES, SLOTS, top, block,
    x_m, x_k, GROUP: tl.constexpr, GROUP_X: tl.constexpr, SPAN: tl.constexpr,
    BITS: tl.constexpr, SIGNED: tl.constexpr, CODES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    at = tl.program_id(0).to(tl.int64) * block + m
    slot = tl.load(slots + at, mask=m < block, other=SLOTS)
    real = slot < SLOTS
    source = slot // top
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts + tl.program_id(0), mask=block > 0, other=0)
    far_n = n.to(tl.int64)
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, SPAN):
        last = tl.minimum(first + SPAN, K)
        group = first // GROUP
        whole = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(first, last, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x_at = x + source[:, None] * x_m + k[None, :] * x_k
            rows = tl.load(x_at, mask=real[:, None] & (k[None, :] < last), other=0)
            inside = (n[None, :] < N) & (k[:, None] < last)
            steps = _steps(
                packed, zeros, expert, far_n, k, N, G, BYTES, inside, group, BITS, SIGNED
            )
            if CODES:
                whole = tl.dot(rows, steps.to(tl.int8), whole, out_dtype=tl.int32)
            else:
                total = tl.dot(rows, steps.to(rows.dtype), total, input_precision="ieee")
        at_scale = scales + (expert * N + far_n) * G + group
        scale = tl.load(at_scale, mask=n < N, other=0.0).to(tl.float32)
        if CODES:
            at_row = row_scales + source * G_X + first // GROUP_X
            row_scale = tl.load(at_row, mask=real, other=0.0)
            total = whole.to(tl.float32) * row_scale[:, None]
        result += total * scale[None, :]
    stored = real[:, None] & (n[None, :] < N)
    tl.store(y + slot[:, None] * N + n[None, :], result.to(y.dtype.element_ty), mask=stored)


def moe_gemm_triton(rows: Rows, plan: BlockPlan, experts: ExpertStack, top: int, y: Tensor) -> None:
    """Write the products of all slots that have an expert into y [slots, N].

    Slot s reads row s ÷ `top`, rounded down.
    """
    x, row_scales, size = rows
    _, N, K = experts.shape
    blocks = len(plan.block_experts)
    if not blocks or not N:
        return
    block, group = len(plan.slots) // blocks, experts.group_size
    block_n = 64
    _moe_gemm[blocks, triton.cdiv(N, block_n)](
        x, experts.packed, y, experts.scales,
        experts.packed if experts.zeros is None else experts.zeros,
        experts.scales if row_scales is None else row_scales, plan.slots, plan.block_experts,
        N, K, experts.scales.shape[2], 1 if row_scales is None else row_scales.shape[1],
        experts.packed.shape[2], len(y), top, block, *x.stride(),
        GROUP=group, GROUP_X=size, SPAN=min(group, size), BITS=experts.spec.format.bits,
        SIGNED=experts.zeros is None, CODES=row_scales is not None,
        BLOCK_M=max(16, triton.next_power_of_2(block)), BLOCK_N=block_n,
        BLOCK_K=32 if min(group, size) <= 32 else 64, enable_fp_fusion=False,
    )  # fmt: skip
