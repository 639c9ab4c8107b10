"""Weight formats as values. Nothing downstream compares strings.

"Symmetric" means one thing here, for every width: **scale = absmax / qmax, codes −qmax … qmax, no
zero point**, rounding half to even. Int8 is absmax/127 with −127 … 127 (−128 is not used), int4
absmax/7 with −7 … 7: what SmoothQuant and QuaRot call symmetric. torchao and GPTQ divide by 7.5 and
allow −8, fbgemm divides by 8: up to 17 % of the error of a Gaussian group under one name
(kernel_anchors §1.1). Ours is the definition under which int4 in groups of 64, on every linear
layer but the tied head, gives SmolLM2-135M an output KL of 0.597 with top-1 0.574 and stories260K
0.223 with 0.763 on the texts of competitors.md (absmax/7.5 gives 0.526 and 0.186 instead).
"""

from dataclasses import dataclass

import torch

__all__ = ["INT4", "INT8", "WeightFormat"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """An integer format for weights. Raises ValueError for an impossible combination."""

    name: str
    bits: int
    qmin: int
    qmax: int
    storage: torch.dtype
    """int8 holds one code per element, uint8 two (low nibble first)."""

    def __post_init__(self) -> None:
        if self.qmin != -self.qmax or not 0 < self.qmax < 1 << (self.bits - 1):
            raise ValueError(
                f"{self.name}: a symmetric {self.bits}-bit range is -q … q with "
                f"0 < q < {1 << (self.bits - 1)}; it is {self.qmin} … {self.qmax}."
            )
        if (self.bits, self.storage) not in ((8, torch.int8), (4, torch.uint8)):
            raise ValueError(
                f"{self.name}: 8 bits are stored as int8 and 4 bits as uint8; "
                f"not {self.bits} bits as {self.storage}."
            )

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of packed codes; an odd row of 4-bit codes is padded to a whole byte."""
        return rows * ((columns * self.bits + 7) // 8)


INT8 = WeightFormat("int8", 8, -127, 127, torch.int8)
INT4 = WeightFormat("int4", 4, -7, 7, torch.uint8)
