"""The operator that turns a cache's rows into packed codes, once for each token.

Codes, scales and zeros are `qparams` and `affine`, bit for bit in every back end: rounding by
division, halves to even, the scale rounded to 16 bits first. `torch` is the definition.
"""

import torch
from torch import Tensor

from quantwatch_kernels.quantize.affine import quantize
from quantwatch_kernels.quantize.packing import pack
from quantwatch_kernels.quantize.qparams import choose_qparams
from quantwatch_kernels.quantize.recipe import PerTensor, WeightSpec
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import Op

__all__ = ["KV_QUANTIZE"]

_LARGEST = 4096

KV_QUANTIZE: Op[[Tensor, WeightSpec], tuple[Tensor, Tensor, Tensor | None]] = Op("kv_quantize")
"""(rows [M, K], spec) → packed codes uint8 [M, bytes], scales [M, G], zeros uint8 [M, G] or None.

Scales are float16, or float32 for all if float16 can't hold one."""


@KV_QUANTIZE.register("torch")
def _torch(x_MK: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    found = choose_qparams(x_MK, spec)
    return pack(quantize(x_MK, found, spec), spec.format), found.scales, found.zeros


def _triton_why_not(x_MK: Tensor, spec: WeightSpec) -> str | None:
    columns = x_MK.shape[1]
    group = min(columns, spec.granularity.group_size(columns)) if columns else 0
    ranges = spec.zero != "float" and spec.clip == "none"
    refused = {
        f"the Triton kernel packs 4 and 8 bits, not {spec.format.bits}": spec.format.bits
        not in (4, 8),
        "the Triton kernel takes each group's whole range, with whole zeros": not ranges
        or isinstance(spec.granularity, PerTensor),
        f"the Triton kernel rounds scales to float16, not {spec.scale_dtype}": spec.scale_dtype
        not in (torch.float16, torch.float32),
        "rows without features": not columns,
        f"groups of {group}: two of them would share a byte": spec.format.bits == 4
        and group % 2 == 1
        and group < columns,
        f"groups of {group}; a program holds {_LARGEST}": group > _LARGEST,
        "the Triton kernel computes in float32, not float64": x_MK.dtype == torch.float64,
    }
    return next((reason for reason, holds in refused.items() if holds), triton_why_not(x_MK))


@KV_QUANTIZE.register("triton", _triton_why_not)
def _triton(x_MK: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    from quantwatch_kernels.serve.triton.kv_quantize import kv_quantize_triton

    return kv_quantize_triton(x_MK, spec)
