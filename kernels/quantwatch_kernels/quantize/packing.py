"""Codes of 2 to 8 bits, packed: a row is one little-endian string of bits.

Code j of a row takes bits j·b … (j + 1)·b − 1, lowest bit first, and the row ends on a whole byte
(the rest is 0). For 4 bits that is: low nibble = even index. Negative codes are in two's
complement. This is the canonical, storable form; layouts of an instruction set live in memory only.
"""

import torch
from torch import Tensor

from quantwatch_kernels.formats import IntFormat

__all__ = ["pack", "unpack"]


def pack(codes: Tensor, fmt: IntFormat) -> Tensor:
    """Pack codes [.., K] into uint8 [.., ⌈K·bits/8⌉]. Raises ValueError for a code out of range."""
    lowest, highest = fmt.qmin, fmt.qmax
    if codes.numel() and not (int(codes.min()) >= lowest and int(codes.max()) <= highest):
        raise ValueError(
            f"codes of {fmt.name} lie in {lowest} … {highest}; "
            f"these span {int(codes.min())} … {int(codes.max())}."
        )
    if fmt.bits == 8:
        return codes.contiguous().view(torch.uint8)
    weights = torch.arange(fmt.bits, device=codes.device)
    bits = (codes.to(torch.int16).unsqueeze(-1) >> weights) & 1
    bits = bits.flatten(-2).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 8))
    places = torch.arange(8, device=codes.device, dtype=torch.uint8)
    packed: Tensor = (bits.view(*bits.shape[:-1], bits.shape[-1] // 8, 8) << places).sum(
        -1, dtype=torch.uint8
    )
    return packed


def unpack(packed: Tensor, fmt: IntFormat, columns: int) -> Tensor:
    """Return the codes [.., columns] of uint8 [.., ⌈columns·bits/8⌉] in the format's storage."""
    width = (columns * fmt.bits + 7) // 8
    if packed.dtype != torch.uint8 or packed.shape[-1] != width:
        raise ValueError(
            f"{columns} packed codes of {fmt.name} need uint8 [.., {width}]; "
            f"got {packed.dtype} {list(packed.shape)}."
        )
    if fmt.bits == 8:
        return packed.view(fmt.storage)
    places = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = ((packed.unsqueeze(-1) >> places) & 1).flatten(-2)[..., : columns * fmt.bits]
    weights = torch.arange(fmt.bits, device=packed.device, dtype=torch.uint8)
    codes: Tensor = (bits.reshape(*bits.shape[:-1], columns, fmt.bits) << weights).sum(
        -1, dtype=torch.uint8
    )
    if not fmt.symmetric:
        return codes
    sign = 1 << (fmt.bits - 1)  # uint8 doesn't sign-extend: the upper half is negative
    return (codes.to(torch.int8) ^ sign) - sign
