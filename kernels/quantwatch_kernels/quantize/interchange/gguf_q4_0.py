"""Blocks of llama.cpp's Q4_0: 32 weights in 18 bytes, the second half in the high nibbles.

Block: float16 d, then 16 bytes; byte j holds code j low and code j + 16 high. w = (q − 8) · d. d is
(the value of largest magnitude) ÷ −8, so it may be negative: scales keep the file's sign, which is
why they are the one place where a scale isn't positive (flipping the codes instead would need 16).
"""

import torch
from torch import Tensor

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.interchange.words import float16_exactly, unsigned
from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.quantize.recipe import PerGroup, WeightSpec

__all__ = ["from_q4_0", "to_q4_0"]

_BLOCK, _BYTES = 32, 18


def to_q4_0(weight: QuantizedWeight) -> Tensor:
    """Return uint8 [N, K/32 · 18].

    Raises ValueError for other than 4 bits, groups other than 32, a zero point other than 8, and
    scales that float16 can't hold.
    """
    codes, zeros = unsigned(weight, (4,), "Q4_0")
    rows, columns = codes.shape
    if weight.spec.granularity != PerGroup(_BLOCK) or columns % _BLOCK:
        raise ValueError(f"Q4_0 holds blocks of 32; this is {columns} inputs by "
                         f"{weight.spec.granularity.group_size(columns)}.")  # fmt: skip
    if bool((zeros != 8).any()):
        raise ValueError(f"Q4_0 has the zero point 8; these reach {int(zeros.min())} … "
                         f"{int(zeros.max())}.")  # fmt: skip
    low, high = codes.view(rows, -1, 2, 16).unbind(2)
    scales = float16_exactly(weight.qparams.scales, "Q4_0").contiguous()
    packed = (low | (high << 4)).to(torch.uint8)
    blocks = torch.cat([scales.unsqueeze(-1).view(torch.uint8), packed], -1)
    return blocks.view(rows, -1)


def from_q4_0(blocks: Tensor) -> QuantizedWeight:
    """Read rows of blocks uint8 [N, K/32 · 18]; raises ValueError for anything else."""
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] % _BYTES:
        raise ValueError(
            f"Q4_0 rows are uint8 [N, multiple of 18]; got {blocks.dtype} {list(blocks.shape)}."
        )
    rows = len(blocks)
    block = blocks.reshape(rows, -1, _BYTES)
    scales = block[..., :2].contiguous().view(torch.float16).squeeze(-1)
    packed = block[..., 2:]
    codes = torch.stack([packed & 15, packed >> 4], 2).reshape(rows, -1)
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(_BLOCK), "integer", scale_dtype=torch.float16)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    return QuantizedWeight(codes, QParams(scales, zeros), spec)
