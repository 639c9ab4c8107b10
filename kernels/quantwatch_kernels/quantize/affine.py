"""Symmetric affine quantization of weights: w ≈ code · scale.

scale = absmax / qmax in float32 whatever the weight's dtype (in float16 255/0.001 is infinite),
code = clamp(round(w / scale)), halves to even, by division: w·(1/scale) gives other codes in 3e-6
of the cases. A group of zeros, or one so small that its scale underflows, has scale 1 and codes 0.
A group with a NaN or infinite weight has scale NaN: the fault stays measurable.

N rows (output channels), K columns (inputs), G = ⌈K / group size⌉ groups per row.
"""

import torch
from torch import Tensor

from quantwatch_kernels.formats import WeightFormat
from quantwatch_kernels.quantize.recipe import Recipe

__all__ = ["choose_scales", "dequantize", "fake_quantize", "quantize"]


def _grouped_absmax(weight_NK: Tensor, group_size: int) -> Tensor:
    parts = torch.split(weight_NK, group_size, dim=-1) if weight_NK.shape[1] else ()
    maxima = [part.float().abs().amax(-1) for part in parts]
    return torch.stack(maxima, -1) if maxima else weight_NK.new_zeros(len(weight_NK), 0).float()


def choose_scales(weight_NK: Tensor, fmt: WeightFormat, group_size: int) -> Tensor:
    """Return float32 scales [N, G], positive, or NaN where the group isn't finite."""
    if weight_NK.ndim != 2 or not weight_NK.is_floating_point():
        raise ValueError(
            f"a weight must be a float matrix; it is {weight_NK.dtype} {list(weight_NK.shape)}."
        )
    scales = _grouped_absmax(weight_NK, group_size) / fmt.qmax
    scales = torch.where(scales == 0, 1.0, scales)
    return torch.where(torch.isfinite(scales), scales, torch.nan)


def _spread(scales_NG: Tensor, group_size: int, columns: int) -> Tensor:
    return scales_NG.repeat_interleave(group_size, dim=-1)[:, :columns]


def quantize(weight_NK: Tensor, scales_NG: Tensor, fmt: WeightFormat, group_size: int) -> Tensor:
    """Return int8 codes [N, K] in qmin … qmax; 0 where the scale is NaN."""
    steps = weight_NK.float() / _spread(scales_NG, group_size, weight_NK.shape[1])
    codes = steps.round_().nan_to_num_(nan=0.0).clamp_(fmt.qmin, fmt.qmax)
    return codes.to(torch.int8)


def dequantize(codes_NK: Tensor, scales_NG: Tensor, group_size: int) -> Tensor:
    """Return float32 values [N, K]."""
    return codes_NK * _spread(scales_NG, group_size, codes_NK.shape[1])


def fake_quantize(weight_NK: Tensor, recipe: Recipe) -> Tensor:
    """Return the weight's quantized values in its own dtype."""
    group_size = recipe.granularity.group_size(weight_NK.shape[1])
    scales = choose_scales(weight_NK, recipe.weights, group_size)
    codes = quantize(weight_NK, scales, recipe.weights, group_size)
    return dequantize(codes, scales, group_size).to(weight_NK.dtype)
