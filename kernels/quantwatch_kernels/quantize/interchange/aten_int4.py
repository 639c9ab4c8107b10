"""The layout in memory that aten's int4 kernel packs for AVX512, written down and checked.

`_convert_weight_to_int4pack_for_cpu` packs codes 0 … 15 [N, K] for the instruction set it runs on.
On AVX512 a block of 64 rows is [K][32 bytes], byte j holding row j low and row j + 32 high; the
rows that are left over (a multiple of 16) are [K][n/2 bytes], rows 2j low and 2j + 1 high. It is
never stored: on another processor the same bytes are another weight (torchao#1117), which is why
`aten_int4_differs` is a question one can ask of the machine at hand.
"""

import torch
from torch import Tensor

__all__ = ["aten_int4_differs", "avx512_int4"]

_BLOCK = 64


def avx512_int4(codes: Tensor) -> Tensor:
    """Return codes 0 … 15 [N, K] in the AVX512 layout, uint8 [N, K/2].

    Raises ValueError for codes out of range, which the native operator lets through (−1 is 15).
    """
    rows, columns = codes.shape
    if rows % 16 or columns % 2:
        raise ValueError(f"aten packs rows by 16 and columns by 2; this is {rows} × {columns}.")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) <= 15:
        raise ValueError(
            f"codes lie in 0 … 15; these span {int(codes.min())} … {int(codes.max())}."
        )
    whole = rows - rows % _BLOCK
    blocks = codes[:whole].to(torch.uint8).view(-1, 2, _BLOCK // 2, columns)
    rest = codes[whole:].to(torch.uint8).view(-1, 2, columns)
    parts = [
        (blocks[:, 0] | (blocks[:, 1] << 4)).transpose(1, 2).flatten(),
        (rest[:, 0] | (rest[:, 1] << 4)).T.flatten(),
    ]
    return torch.cat(parts).view(rows, columns // 2)


def aten_int4_differs() -> str | None:
    """Say where this machine's packing departs from the AVX512 layout, None where it doesn't."""
    codes = torch.arange(80 * 32).view(80, 32) * 7 % 16
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    wrong = (packed.view(80, 16) != avx512_int4(codes)).nonzero()
    if not len(wrong):
        return None
    capability = torch.backends.cpu.get_cpu_capability()
    return f"on {capability} byte {wrong[0].tolist()} of 80 × 32 codes is another one"
