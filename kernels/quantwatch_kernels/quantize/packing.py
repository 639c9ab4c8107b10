"""Two 4-bit codes per byte: low nibble = even index, two's complement, odd rows padded with code 0.

This is the canonical, storable form. Layouts of an instruction set live in memory only.
"""

import torch
from torch import Tensor

__all__ = ["pack4", "unpack4"]


def pack4(codes: Tensor) -> Tensor:
    """Pack int8 codes [.., K] in −8 … 7 into uint8 [.., ⌈K/2⌉]. Raises ValueError out of range."""
    if codes.numel() and not (int(codes.min()) >= -8 and int(codes.max()) <= 7):
        raise ValueError(
            f"4-bit codes lie in -8 … 7; these span {int(codes.min())} … {int(codes.max())}."
        )
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    nibbles = (codes & 15).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack4(packed: Tensor, columns: int) -> Tensor:
    """Return the int8 codes [.., columns] of uint8 [.., ⌈columns/2⌉]."""
    if packed.dtype != torch.uint8 or packed.shape[-1] != (columns + 1) // 2:
        raise ValueError(
            f"{columns} packed 4-bit codes need uint8 [.., {(columns + 1) // 2}]; "
            f"got {packed.dtype} {list(packed.shape)}."
        )
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :columns]
    return (nibbles.to(torch.int8) ^ 8) - 8  # uint8 doesn't sign-extend: 8 … 15 become −8 … −1
