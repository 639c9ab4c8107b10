"""Number formats as values: their range, step and precision. Nothing downstream compares strings.

"Symmetric" means one thing here, for every width: **scale = absmax / qmax, codes −qmax … qmax, no
zero point**, rounding half to even. Int8 is absmax/127 with −127 … 127 (−128 is not used), int4
absmax/7 with −7 … 7: what SmoothQuant and QuaRot call symmetric. torchao and GPTQ divide by 7.5 and
allow −8, fbgemm divides by 8: up to 17 % of the error of a Gaussian group under one name
(kernel_anchors §1.1). Ours is the definition under which int4 in groups of 64, on every linear
layer but the tied head, gives SmolLM2-135M an output KL of 0.597 with top-1 0.574 and stories260K
0.223 with 0.763 on the texts of competitors.md (absmax/7.5 gives 0.526 and 0.186 instead).

"Asymmetric" is codes 0 … 2^bits − 1 with a zero point (`uint4` …).
"""

from dataclasses import dataclass

import torch

__all__ = [
    "BF16",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "INT4",
    "INT8",
    "INT_FORMATS",
    "FloatFormat",
    "IntFormat",
]


@dataclass(frozen=True, slots=True)
class IntFormat:
    """Integer codes qmin … qmax, equally spaced. Raises ValueError for an impossible combination.

    Symmetric (−qmax … qmax, the lowest code unused) or asymmetric (0 … 2^bits − 1).
    """

    name: str
    bits: int
    qmin: int
    qmax: int

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"{self.name}: bits must be in 2 … 8; they are {self.bits}.")
        signed = (-(2 ** (self.bits - 1) - 1), 2 ** (self.bits - 1) - 1)
        unsigned = (0, 2**self.bits - 1)
        if (self.qmin, self.qmax) not in (signed, unsigned):
            raise ValueError(
                f"{self.name}: {self.bits}-bit codes are {signed[0]} … {signed[1]} (symmetric) or "
                f"0 … {unsigned[1]} (asymmetric); not {self.qmin} … {self.qmax}."
            )

    @property
    def symmetric(self) -> bool:
        """Whether zero is code 0 and needs no zero point."""
        return self.qmin < 0

    @property
    def storage(self) -> torch.dtype:
        """Dtype of one unpacked code."""
        return torch.int8 if self.symmetric else torch.uint8

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of packed codes; each row ends on a whole byte."""
        return rows * ((columns * self.bits + 7) // 8)


def _integers() -> dict[str, IntFormat]:
    formats = {}
    for bits in range(2, 9):
        half = 2 ** (bits - 1) - 1
        formats[f"int{bits}"] = IntFormat(f"int{bits}", bits, -half, half)
        formats[f"uint{bits}"] = IntFormat(f"uint{bits}", bits, 0, 2**bits - 1)
    return formats


INT_FORMATS = _integers()
"""int2 … int8 (symmetric) and uint2 … uint8 (asymmetric) by name."""

INT8 = INT_FORMATS["int8"]
INT4 = INT_FORMATS["int4"]


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A floating-point format of torch: its step is relative, and absolute only below normal."""

    name: str
    dtype: torch.dtype

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return 8 * self.dtype.itemsize

    @property
    def largest(self) -> float:
        """Largest finite value: 65504 for float16."""
        return torch.finfo(self.dtype).max

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal number to nearest: 2⁻¹¹ for float16."""
        return torch.finfo(self.dtype).eps / 2

    @property
    def smallest_normal(self) -> float:
        """Below it the relative precision ends: 6.1e-5 for float16."""
        return torch.finfo(self.dtype).smallest_normal

    @property
    def smallest_subnormal(self) -> float:
        """The fixed step below `smallest_normal`."""
        return torch.finfo(self.dtype).smallest_normal * torch.finfo(self.dtype).eps


FP16 = FloatFormat("float16", torch.float16)
BF16 = FloatFormat("bfloat16", torch.bfloat16)
FP8_E4M3 = FloatFormat("float8_e4m3fn", torch.float8_e4m3fn)
FP8_E5M2 = FloatFormat("float8_e5m2", torch.float8_e5m2)
