"""Scores of queries and keys from int8 codes: exact sums of products of codes, scaled after.

    S[t, j] = s_q[t] s_k[j] Σ q̂ k̂  (+ s_k[j] Σ r_q k̂)  (+ Σ q r_k)

r are what rounding left of queries and keys, in float16; a term is there if its residual is. The
first sum is of whole numbers and exact: `aten` makes it in float32 up to D = 1,040 (D · 127² < 2²⁴)
and in float64 beyond, `triton` in int32. The others are float32; the residual of the queries times
codes is a product of 11 and 7 bits, exact before it is summed.
"""

from typing import NamedTuple

from torch import Tensor

from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import Op

__all__ = ["INT8_QK", "Coded"]

_EXACT = 1_040


class Coded(NamedTuple):
    """Queries or keys as codes."""

    codes: Tensor
    """int8 [B, H, T, D], −127 … 127."""
    scales: Tensor
    """float32 [B, H, T, 1], NaN where something wasn't finite; may be expanded."""
    residual: Tensor | None = None
    """float16 [B, H, T, D]: what codes · scales leaves of the numbers."""


INT8_QK: Op[[Coded, Coded, Tensor], Tensor] = Op("int8_qk")
"""(queries, keys, queries float32 [B, H, Tq, D]) → scores float32 [B, H, Tq, Tk].

The plain queries are read only where the keys have a residual."""


@INT8_QK.register("aten")
def _aten(queries: Coded, keys: Coded, plain: Tensor) -> Tensor:
    q, k = queries.codes.float(), keys.codes.float()
    scores = _product(q, k) * (queries.scales * keys.scales.mT)
    if queries.residual is not None:
        scores = scores + queries.residual.float() @ (k * keys.scales).mT
    if keys.residual is not None:
        scores = scores + plain @ keys.residual.float().mT
    return scores


def _product(q_codes: Tensor, k_codes: Tensor) -> Tensor:
    if q_codes.shape[-1] <= _EXACT:
        return q_codes @ k_codes.mT
    return (q_codes.double() @ k_codes.double().mT).float()


@INT8_QK.register("reference")
def _reference(queries: Coded, keys: Coded, plain: Tensor) -> Tensor:
    k = keys.codes.double() * keys.scales.double()
    scores = (queries.codes.double() * queries.scales.double()) @ k.mT
    if queries.residual is not None:
        scores = scores + queries.residual.double() @ k.mT
    if keys.residual is not None:
        scores = scores + plain.double() @ keys.residual.double().mT
    return scores.float()


def _triton_why_not(queries: Coded, keys: Coded, plain: Tensor) -> str | None:
    if keys.codes.device != queries.codes.device or plain.device != queries.codes.device:
        return f"queries lie on {queries.codes.device}, keys on {keys.codes.device}"
    return triton_why_not(queries.codes)


@INT8_QK.register("triton", _triton_why_not)
def _triton(queries: Coded, keys: Coded, plain: Tensor) -> Tensor:
    from quantwatch_kernels.serve.triton.int8_qk import int8_qk_triton

    return int8_qk_triton(queries, keys, plain)
