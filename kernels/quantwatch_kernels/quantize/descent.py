"""Coordinate descent on codes: give each input column the best code while all others stay.

With E = Ŵ − W and the Hessian H of the inputs, tr(E H Eᵀ) is least in column k at
w_k + e_k − (E H)_k / H_kk; rounding that to nearest is exact, since the objective is a parabola in
e_k. No step raises the error, so that a sweep over GPTQ's codes, whose early columns couldn't know
what the late ones would do, only improves them (7 to 13 % in two sweeps on SmolLM2-135M at 3 and 4
bits). Blocks of 128 columns share one product with H.
"""

import torch
from torch import Tensor

from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.quantize.recipe import WeightSpec

__all__ = ["by_column", "descend", "round_column"]

_BLOCK = 128


def by_column(qparams: QParams) -> tuple[Tensor, Tensor | None]:
    """Return scales and zeros as contiguous float32 [G, N]."""
    zeros = None if qparams.zeros is None else qparams.zeros.float().T.contiguous()
    return qparams.scales.float().T.contiguous(), zeros


def round_column(steps: Tensor, zeros: Tensor | None, spec: WeightSpec) -> Tensor:
    """Round in place as `affine.quantize` does: an integer zero is added after rounding."""
    if zeros is None:
        steps.round_()
    elif spec.zero == "integer":
        steps.round_().add_(zeros)
    else:
        steps.add_(zeros).round_()
    return steps.clamp_(spec.format.qmin, spec.format.qmax)


def descend(
    weight_KN: Tensor,
    codes_KN: Tensor,
    groups: list[int],
    parameters: tuple[QParams, WeightSpec],
    hessian_KK: Tensor,
) -> None:
    """Improve float32 codes [K, N] in place, one sweep.

    Rows of weight and codes are input columns, in any order; `groups` says which group each is in,
    and H (float32) has that order too. A column with H_kk = 0 keeps its code.
    """
    (scales, zeros), spec = by_column(parameters[0]), parameters[1]
    index = torch.tensor(groups)
    shifted = codes_KN if zeros is None else codes_KN - zeros[index]
    errors = shifted * scales[index] - weight_KN
    curvature = hessian_KK.diagonal().tolist()
    for start in range(0, len(codes_KN), _BLOCK):
        block = slice(start, start + _BLOCK)
        slopes = hessian_KK[block] @ errors
        for k in range(start, start + len(slopes)):
            if not curvature[k] > 0:
                continue
            scale, zero = scales[groups[k]], None if zeros is None else zeros[groups[k]]
            target = weight_KN[k] + errors[k] - slopes[k - start] / curvature[k]
            codes_KN[k] = round_column(target / scale, zero, spec)
            error = (codes_KN[k] if zero is None else codes_KN[k] - zero) * scale - weight_KN[k]
            slopes.addr_(hessian_KK[block, k], error - errors[k])
            errors[k] = error
