"""int8 queries × int8 keys in exact int32, scaled on the way out, with the residuals' products.

One program a block of queries and keys of one head. Products of a float16 residual and codes run on
float16 matrix units and are exact before they are summed in float32; the plain queries with the
keys' residual are float32 products, not TF32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantwatch_kernels.serve.int8_qk import Coded

__all__ = ["int8_qk_triton"]


@triton.jit
def _int8_qk(
    q, k, y, q_scales, k_scales, q_rest, k_rest, plain, M, N, D,
    q_z, q_m, q_d, k_z, k_n, k_d, qs_z, qs_m, ks_z, ks_n, qr_z, qr_m, qr_d, kr_z, kr_n, kr_d,
    p_z, p_m, p_d, HAS_Q: tl.constexpr, HAS_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    far_m, far_n = m.to(tl.int64), n.to(tl.int64)
    whole = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    of_q = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    of_k = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        rows = (m[:, None] < M) & (d[None, :] < D)
        columns = (n[None, :] < N) & (d[:, None] < D)
        at = q_z * z + far_m[:, None] * q_m + d[None, :] * q_d
        q_block = tl.load(q + at, mask=rows, other=0)
        at = k_z * z + far_n[None, :] * k_n + d[:, None] * k_d
        k_block = tl.load(k + at, mask=columns, other=0)
        whole = tl.dot(q_block, k_block, whole, out_dtype=tl.int32)
        if HAS_Q:
            at = qr_z * z + far_m[:, None] * qr_m + d[None, :] * qr_d
            rest = tl.load(q_rest + at, mask=rows, other=0.0)
            of_q = tl.dot(rest, k_block.to(tl.float16), of_q)
        if HAS_K:
            at = p_z * z + far_m[:, None] * p_m + d[None, :] * p_d
            numbers = tl.load(plain + at, mask=rows, other=0.0)
            at = kr_z * z + far_n[None, :] * kr_n + d[:, None] * kr_d
            rest_k = tl.load(k_rest + at, mask=columns, other=0.0).to(tl.float32)
            of_k = tl.dot(numbers, rest_k, of_k, input_precision="ieee")
    q_scale = tl.load(q_scales + qs_z * z + far_m * qs_m, mask=m < M, other=0.0)
    k_scale = tl.load(k_scales + ks_z * z + far_n * ks_n, mask=n < N, other=0.0)
    scores = whole.to(tl.float32) * (q_scale[:, None] * k_scale[None, :])
    if HAS_Q:
        scores += of_q * k_scale[None, :]
    if HAS_K:
        scores += of_k
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y + z * M * N + far_m[:, None] * N + n[None, :], scores, mask=inside)


def int8_qk_triton(queries: Coded, keys: Coded, plain: Tensor) -> Tensor:
    """Return scores float32 [B, H, Tq, Tk]; operands of any strides."""
    batch, heads, M, D = queries.codes.shape
    N = keys.codes.shape[2]
    y = torch.empty(batch, heads, M, N, dtype=torch.float32, device=plain.device)
    if not y.numel():
        return y
    q, k, q_scales, k_scales, numbers = (
        x.flatten(0, 1)
        for x in (queries.codes, keys.codes, queries.scales, keys.scales, plain.float())
    )
    q_rest = q if queries.residual is None else queries.residual.flatten(0, 1)
    k_rest = k if keys.residual is None else keys.residual.flatten(0, 1)
    block_m, block_n = (16, 64) if M <= 16 else (64, 64)
    _int8_qk[triton.cdiv(M, block_m), triton.cdiv(N, block_n), batch * heads](
        q, k, y, q_scales, k_scales, q_rest, k_rest, numbers, M, N, D,
        *q.stride(), *k.stride(), *q_scales.stride()[:2], *k_scales.stride()[:2],
        *q_rest.stride(), *k_rest.stride(), *numbers.stride(),
        HAS_Q=queries.residual is not None, HAS_K=keys.residual is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=64, enable_fp_fusion=False,
    )  # fmt: skip
    return y
