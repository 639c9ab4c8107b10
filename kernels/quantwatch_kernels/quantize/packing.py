"""Codes of 2 to 8 bits, packed: a row is one little-endian string of bits.

Code j of a row takes bits j·b … (j + 1)·b − 1, lowest bit first, and the row ends on a whole byte
(the rest is 0). For 4 bits that is: low nibble = even index. Negative codes are in two's
complement. This is the canonical, storable form; layouts of an instruction set live in memory only.

Eight codes are b bytes, at most 56 bits: they are put together in one int64 and taken apart again,
which touches an eighth of the memory that single bits would.
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
    columns, mask = codes.shape[-1], (1 << fmt.bits) - 1
    eights = _in_parts(codes, 8)
    word = torch.zeros(eights.shape[:-1], dtype=torch.int64, device=codes.device)
    for i in range(8):
        word |= (eights[..., i].to(torch.int64) & mask) << (fmt.bits * i)
    parts = [((word >> (8 * j)) & 255).to(torch.uint8) for j in range(fmt.bits)]
    packed = torch.stack(parts, -1).flatten(-2)
    return packed[..., : (columns * fmt.bits + 7) // 8].contiguous()


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
    parts = _in_parts(packed, fmt.bits)
    word = torch.zeros(parts.shape[:-1], dtype=torch.int64, device=packed.device)
    for j in range(fmt.bits):
        word |= parts[..., j].to(torch.int64) << (8 * j)
    mask = (1 << fmt.bits) - 1
    fields = [((word >> (fmt.bits * i)) & mask).to(torch.uint8) for i in range(8)]
    codes = torch.stack(fields, -1).flatten(-2)[..., :columns].contiguous()
    if not fmt.symmetric:
        return codes
    sign = 1 << (fmt.bits - 1)  # uint8 doesn't sign-extend: the upper half is negative
    return (codes.to(torch.int8) ^ sign) - sign


def _in_parts(values: Tensor, size: int) -> Tensor:
    """Return [.., ⌈n/size⌉, size], filled up with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size))
    return padded.reshape(*values.shape[:-1], padded.shape[-1] // size, size)
