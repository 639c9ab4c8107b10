"""Experts' products: y[t, j] = x[t] · W[ids[t, j]]ᵀ with INT4 or INT8 experts, W4A16 or W4A4.

Rows are gathered by expert and padded to blocks (`moe_align`), multiplied expert by expert and put
back; the padding is zeros and never read. W4A16 multiplies quantized weights in float32. With
`activations` rows are rounded to codes, too, and products of codes are summed exactly within each
group (in float32 up to 2²⁴, else in float64), then scaled: y = s_row · Σ_g s_g · Σ_k a · (w − z).
There a slot's bits depend on its row and expert alone; in W4A16 up to a float32 product's rounding.
The result is rounded to the input's dtype once.

Id −1 gives a row of zeros. Experts without tokens are not touched: a NaN in one reaches nobody. A
NaN in a row stays in its slots. `reference` is one slot at a time in float64. Given up on a CPU:
speed, as codes are unpacked for each call; `triton` is a grouped kernel over the same plan.
"""

from itertools import pairwise

import torch
from torch import Tensor

from quantwatch_kernels.quantize.activations import (
    fake_quantize_input,
    input_qparams,
    quantize_input,
)
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.qparams import spread
from quantwatch_kernels.quantize.recipe import ActivationSpec
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import Op
from quantwatch_kernels.serve.fused_act import Activation, act_mul
from quantwatch_kernels.serve.moe_align import align_blocks
from quantwatch_kernels.serve.moe_experts import ExpertStack

__all__ = ["MOE_GEMM", "moe_gemm", "moe_mlp"]

_EXACT = 2**24
"""Whole numbers up to here are exact in float32, in whatever order they are added."""

MOE_GEMM: Op[[Tensor, Tensor, ExpertStack, int], Tensor] = Op("moe_gemm")
"""(x [T, K] or [T, k, K], ids [T, k], experts, block) → [T, k, N] in the dtype of x."""


def moe_gemm(
    x: Tensor, ids_Tk: Tensor, experts: ExpertStack, block: int = 16, backend: str | None = None
) -> Tensor:
    """Return [T, k, N]; x [T, K] is the same for a token's experts, [T, k, K] one row for each.

    Raises ValueError for shapes that don't fit and ids that aren't −1 … E − 1.
    """
    shapes = ((len(ids_Tk), experts.in_features), (*ids_Tk.shape, experts.in_features))
    if ids_Tk.ndim != 2 or not x.is_floating_point() or tuple(x.shape) not in shapes:
        raise ValueError(
            f"moe_gemm: with ids {list(ids_Tk.shape)} and {experts.in_features} inputs x must be "
            f"floating [T, K] or [T, k, K]; it is {x.dtype} {list(x.shape)}."
        )
    return MOE_GEMM.run(backend, x, ids_Tk, experts, block)


def moe_mlp(
    x_TK: Tensor,
    routing: tuple[Tensor, Tensor],
    gate_up: ExpertStack,
    down: ExpertStack,
    activation: Activation = "silu",
) -> Tensor:
    """Return Σ_j w[t, j] · down(act(gate) · up) of each token [T, K], in the dtype of x.

    `routing` are ids and float32 weights [T, k]; `gate_up` has gate's outputs before up's.
    """
    ids, weights = routing
    if weights.shape != ids.shape or not weights.is_floating_point():
        raise ValueError(f"weights must be floating {list(ids.shape)}; they are {weights.dtype}.")
    gate, up = moe_gemm(x_TK, ids, gate_up).chunk(2, -1)
    y = moe_gemm(act_mul(gate, up, activation), ids, down)
    weighted = y.float() * weights.float()[..., None]
    # Another device has this expert: whatever its weight is, nothing is added here.
    return weighted.masked_fill((ids < 0)[..., None], 0.0).sum(1).to(x_TK.dtype)


def _slot_rows(x: Tensor, ids: Tensor) -> Tensor:
    """Return one row per slot, [T · k, K]."""
    if x.ndim == 3:
        return x.reshape(-1, x.shape[-1])
    return x.repeat_interleave(ids.shape[1], 0)


@MOE_GEMM.register("aten")
def _aten(x: Tensor, ids_Tk: Tensor, experts: ExpertStack, block: int) -> Tensor:
    plan = align_blocks(ids_Tk, experts.shape[0], block)
    rows = _slot_rows(x, ids_Tk)
    # One more row of zeros, which the sentinel reads, and one more to write that nobody reads.
    gathered = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[plan.slots]
    y = rows.new_zeros(len(rows) + 1, experts.shape[1])
    starts = plan.first_row.tolist()
    for expert, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            product = _product(gathered[start:end], experts.expert(expert), experts.activations)
            y[plan.slots[start:end]] = product.to(x.dtype)
    return y[:-1].view(*ids_Tk.shape, experts.shape[1])


def _product(rows: Tensor, weight: QuantizedWeight, activations: ActivationSpec | None) -> Tensor:
    if activations is None:
        return rows.float() @ weight.values.T
    return _integer_product(rows, weight, activations)


def _integer_product(rows: Tensor, weight: QuantizedWeight, activations: ActivationSpec) -> Tensor:
    """Multiply codes exactly within groups, then scale; float32 [M, N]."""
    columns = rows.shape[1]
    made = input_qparams(rows, activations)
    size, other = (
        min(columns, spec.granularity.group_size(columns)) for spec in (weight.spec, activations)
    )
    a = quantize_input(rows, made, activations).int()
    if made.zeros is not None:
        a = a - spread(made.zeros, other, columns).int()
    w, zeros = weight.codes.int(), weight.qparams.zeros
    if zeros is not None:
        w = w - spread(zeros, size, columns).int()
    span = min(size, other)
    row_scales = spread(made.scales.float(), other, columns)[:, ::span]
    weight_scales = spread(weight.qparams.scales.float(), size, columns)[:, ::span]
    y = rows.new_zeros(len(rows), len(w), dtype=torch.float32)
    for group, start in enumerate(range(0, columns, span)):
        left, right = a[:, start : start + span], w[:, start : start + span]
        sums = _exact_product(left, right, weight.spec.format.bits + activations.format.bits)
        y += sums.float() * row_scales[:, group, None] * weight_scales[:, group]
    return y


def _exact_product(left: Tensor, right: Tensor, bits: int) -> Tensor:
    """Multiply whole numbers [M, S] and [N, S] whose products are below 2^bits."""
    dtype = torch.float32 if left.shape[1] << bits <= _EXACT else torch.float64
    return left.to(dtype) @ right.to(dtype).T


@MOE_GEMM.register("reference")
def _reference(x: Tensor, ids_Tk: Tensor, experts: ExpertStack, block: int) -> Tensor:
    align_blocks(ids_Tk, experts.shape[0], block)  # the same demands on ids
    rows = _slot_rows(x, ids_Tk)
    if experts.activations is not None:
        rows = fake_quantize_input(rows.float(), experts.activations)
    y = torch.zeros(len(rows), experts.shape[1], dtype=torch.float64, device=x.device)
    for slot, expert in enumerate(ids_Tk.flatten().tolist()):
        if expert >= 0:
            y[slot] = experts.expert(expert).values.double() @ rows[slot].double()
    return y.to(x.dtype).view(*ids_Tk.shape, experts.shape[1])


def _triton_why_not(x: Tensor, ids_Tk: Tensor, experts: ExpertStack, block: int) -> str | None:
    del ids_Tk, block
    fmt, inputs = experts.spec.format, experts.activations
    if fmt.bits not in (4, 8):
        return f"the Triton kernel unpacks 4 and 8 bits, not {fmt.bits}"
    coded = () if inputs is None else (fmt, inputs.format)
    if wide := [each.name for each in coded if each.bits == 8 and not each.symmetric]:
        return f"{wide[0]} codes less their zero don't fit the int8 that is multiplied"
    if x.dtype == torch.float64:
        return "the Triton kernel sums in float32, not float64"
    if x.device != experts.packed.device:
        return f"inputs lie on {x.device} and experts on {experts.packed.device}"
    return triton_why_not(x, bfloat16=x.dtype == torch.bfloat16)


@MOE_GEMM.register("triton", _triton_why_not)
def _triton(x: Tensor, ids_Tk: Tensor, experts: ExpertStack, block: int) -> Tensor:
    from quantwatch_kernels.serve.triton.moe_gemm import moe_gemm_triton

    plan = align_blocks(ids_Tk, experts.shape[0], block)
    top, columns = ids_Tk.shape[1] if x.ndim == 2 else 1, experts.in_features
    rows, scales, size = x.reshape(-1, columns), None, columns
    if experts.activations is not None:
        made = input_qparams(rows, experts.activations)
        size = min(columns, experts.activations.granularity.group_size(columns))
        codes = quantize_input(rows, made, experts.activations).int()
        if made.zeros is not None:
            codes = codes - spread(made.zeros, size, columns).int()
        rows, scales = codes.to(torch.int8), made.scales.float()
    y = torch.zeros(ids_Tk.numel(), experts.shape[1], dtype=x.dtype, device=x.device)
    moe_gemm_triton((rows, scales, size), plan, experts, top, y)
    return y.view(*ids_Tk.shape, experts.shape[1])
