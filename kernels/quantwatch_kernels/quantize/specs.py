"""How one matrix or activation is quantized: values that fail on construction."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from quantwatch_kernels.formats import IntFormat

__all__ = [
    "ActivationSpec",
    "Clip",
    "Granularity",
    "Method",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "RotationSpec",
    "WeightSpec",
    "Zero",
    "dtype_name",
    "granularity_name",
]


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for the whole matrix."""

    def group_size(self, columns: int) -> int:
        """Return the number of inputs that share a scale."""
        return max(1, columns)


@dataclass(frozen=True, slots=True)
class PerChannel:
    """One scale per row: an output channel of a weight, a token of an activation."""

    def group_size(self, columns: int) -> int:
        """Return the number of inputs that share a scale."""
        return max(1, columns)


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale per `size` neighbouring inputs of a row; the last group may be shorter."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"group size must be at least 2; it is {self.size}.")

    def group_size(self, columns: int) -> int:  # noqa: ARG002 — the same question as PerChannel's
        """Return the number of inputs that share a scale."""
        return self.size


Granularity = PerTensor | PerChannel | PerGroup
Zero = Literal["none", "integer", "float"]
Clip = Literal["none", "mse"]
Method = Literal["nearest", "gptq", "awq", "hqq"]
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """How one weight matrix is quantized.

    `zero` follows from the format: "none" with a symmetric one; with an asymmetric one "integer"
    (a code; 0 stays representable) or "float" (any value; a constant group is as exact as its
    scale).
    """

    format: IntFormat
    granularity: Granularity
    zero: Zero = "none"
    clip: Clip = "none"
    method: Method = "nearest"
    scale_dtype: torch.dtype = torch.float32
    rounding: Literal["nearest", "stochastic"] = "nearest"
    scales: Literal["free", "stepped"] = "free"
    """stepped: multiples 1 … 18 of one scale per row, which int8 activations are multiplied by."""

    def __post_init__(self) -> None:
        if self.format.symmetric != (self.zero == "none"):
            wanted = "none" if self.format.symmetric else "integer or float"
            raise ValueError(f"{self.format.name} goes with zero {wanted}, not {self.zero!r}.")
        if self.scale_dtype not in _SCALE_DTYPES:
            raise ValueError(f"scales are float32, bfloat16 or float16; not {self.scale_dtype}.")
        if self.method == "hqq" and self.zero != "float":
            raise ValueError(f"hqq fits a float zero; it can't make zero {self.zero!r}.")
        if self.rounding == "stochastic" and self.method != "nearest":
            raise ValueError(
                f"{self.method} decides itself how to round; stochastic doesn't apply."
            )
        if self.scales == "stepped":
            self._check_stepped()

    def _check_stepped(self) -> None:
        grouped = isinstance(self.granularity, PerGroup)
        if self.format.bits != 4 or self.zero == "float" or not grouped:
            raise ValueError(
                "stepped scales are for int4 and uint4 in groups, with zero none or integer; not "
                f"for {self.format.name} per {granularity_name(self.granularity)}, "
                f"zero {self.zero}."
            )
        if self.rounding == "stochastic":
            raise ValueError("stepped scales may clip, which stochastic rounding must not.")

    @property
    def calibrated(self) -> bool:
        """Whether it needs activations."""
        return self.method in ("gptq", "awq")

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight [rows, columns] as it is stored, scales and zeros included.

        A packed layer keeps a scale per row for PerTensor too; a row of zeros ends on a byte.
        """
        groups = -(-columns // self.granularity.group_size(columns))
        scales = rows * groups * self.scale_dtype.itemsize
        if self.scales == "stepped":
            scales = rows * (groups + self.scale_dtype.itemsize)  # a byte per step
        zeros = {"none": 0, "integer": self.format.num_bytes(rows, groups), "float": scales}
        return self.format.num_bytes(rows, columns) + scales + zeros[self.zero]

    def to_json(self) -> dict[str, object]:
        """Return what makes two specs the same, the definition of the code range included."""
        described: dict[str, object] = {
            "weights": self.format.name,
            "range": [self.format.qmin, self.format.qmax],
            "granularity": granularity_name(self.granularity),
            "group_size": getattr(self.granularity, "size", None),
        }
        # Only what departs from the plain recipe, so that its digest is what it always was.
        plain = WeightSpec(self.format, self.granularity, self.zero)
        for name in ("clip", "method", "rounding", "scales"):
            if getattr(self, name) != getattr(plain, name):
                described[name] = getattr(self, name)
        if self.zero != "none":
            described["zero"] = self.zero
        if self.scale_dtype != torch.float32:
            described["scale_dtype"] = dtype_name(self.scale_dtype)
        return described


def dtype_name(dtype: torch.dtype) -> str:
    """Return float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def granularity_name(granularity: Granularity) -> str:
    """Return tensor, channel or group."""
    return {PerTensor: "tensor", PerChannel: "channel", PerGroup: "group"}[type(granularity)]


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """How the inputs of the quantized linear layers are quantized.

    Dynamic scales come from each token (PerChannel), each token's groups (PerGroup) or the whole
    input (PerTensor, which makes rows depend on each other). Static scales are per tensor and come
    from an observer over calibration data.
    """

    format: IntFormat
    granularity: Granularity = field(default_factory=PerChannel)
    static: bool = False
    observer: Literal["minmax", "moving_average", "histogram", "mse", "percentile"] = "minmax"
    clip_ratio: float = 1.0
    """Share of a dynamic range that is kept; QuaRot keeps 0.9 at 4 bits."""

    def __post_init__(self) -> None:
        if self.static and not isinstance(self.granularity, PerTensor):
            raise ValueError("static activation scales are per tensor.")
        if not 0 < self.clip_ratio <= 1:
            raise ValueError(f"clip_ratio lies in (0, 1]; it is {self.clip_ratio}.")
        if self.static and self.clip_ratio != 1:
            raise ValueError(
                "clip_ratio belongs to dynamic ranges; a static one is the observer's. "
                f"It is {self.clip_ratio}."
            )

    def by_token(self, bits: int) -> bool:
        """Say whether each token has a scale of its own, made as it comes, and so many bits."""
        whole = isinstance(self.granularity, PerChannel)
        return whole and not self.static and self.format.bits == bits

    def to_json(self) -> dict[str, object]:
        """Return what makes two specs the same."""
        return {
            "format": self.format.name,
            "granularity": granularity_name(self.granularity),
            "group_size": getattr(self.granularity, "size", None),
            "static": self.static,
            "observer": self.observer if self.static else None,
            "clip_ratio": self.clip_ratio,
        }


@dataclass(frozen=True, slots=True)
class RotationSpec:
    """Which orthogonal rotations are folded into the weights, or done online (`down`)."""

    residual: bool = True
    """R1: the residual stream, norm gains folded into the next weights first."""
    values: bool = False
    """R2: each attention head's values, undone in the output projection."""
    down: bool = False
    """R4: the input of the down projection, online; its inverse is in the weight."""
    seed: int = 0
    block: int | None = None
    """Width of a block-diagonal Hadamard; None: the whole width."""
