"""How a model is quantized: values that fail on construction, not strings and booleans."""

import fnmatch
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch

from quantwatch_kernels.formats import INT_FORMATS, IntFormat

__all__ = [
    "ActivationSpec",
    "Granularity",
    "LayerRule",
    "Method",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "Recipe",
    "RotationSpec",
    "WeightSpec",
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
    (a code; 0 stays representable) or "float" (any value; a constant group is exact).
    """

    format: IntFormat
    granularity: Granularity
    zero: Zero = "none"
    clip: Clip = "none"
    method: Method = "nearest"
    scale_dtype: torch.dtype = torch.float32
    rounding: Literal["nearest", "stochastic"] = "nearest"

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

    @property
    def calibrated(self) -> bool:
        """Whether it needs activations."""
        return self.method in ("gptq", "awq")

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of codes, scales and zero points of a weight [rows, columns]."""
        groups = -(-columns // self.granularity.group_size(columns))
        scales = 1 if isinstance(self.granularity, PerTensor) else rows * groups
        size = self.scale_dtype.itemsize
        zeros = {"none": 0, "integer": (scales * self.format.bits + 7) // 8, "float": scales * size}
        return self.format.num_bytes(rows, columns) + scales * size + zeros[self.zero]

    def to_json(self) -> dict[str, object]:
        """Return what makes two specs the same, the definition of the code range included."""
        described: dict[str, object] = {
            "weights": self.format.name,
            "range": [self.format.qmin, self.format.qmax],
            "granularity": _granularity_name(self.granularity),
            "group_size": getattr(self.granularity, "size", None),
        }
        # Only what departs from the plain recipe, so that its digest is what it always was.
        plain = WeightSpec(self.format, self.granularity, self.zero)
        for name in ("clip", "method", "rounding"):
            if getattr(self, name) != getattr(plain, name):
                described[name] = getattr(self, name)
        if self.zero != "none":
            described["zero"] = self.zero
        if self.scale_dtype != torch.float32:
            described["scale_dtype"] = _dtype_name(self.scale_dtype)
        return described


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _granularity_name(granularity: Granularity) -> str:
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

    def to_json(self) -> dict[str, object]:
        """Return what makes two specs the same."""
        return {
            "format": self.format.name,
            "granularity": _granularity_name(self.granularity),
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


@dataclass(frozen=True, slots=True)
class LayerRule:
    """A glob over scopes (or their last component), and what its layers get; None: kept."""

    match: str
    weights: WeightSpec | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """Quantization of every linear layer that `exclude` doesn't match."""

    weights: WeightSpec
    exclude: tuple[str, ...] = ("head", "router")
    """Globs over scopes and over their last component. Norms are never quantized."""
    layers: tuple[LayerRule, ...] = ()
    """The first rule that matches replaces `weights`."""
    embedding: WeightSpec | None = None
    """The input embedding and, if tied to it, the head: one matrix, quantized once."""
    activations: ActivationSpec | None = None
    smooth: float | None = None
    """SmoothQuant's α: how much of the activations' range moves into the weights."""
    rotation: RotationSpec | None = None
    residual_dtype: tuple[tuple[str, torch.dtype], ...] = ()
    """(glob over layers, dtype) of the residual stream that leaves the layer."""

    def __post_init__(self) -> None:
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise ValueError(f"smooth lies in 0 … 1; it is {self.smooth}.")

    @property
    def calibrated(self) -> bool:
        """Whether `quantize_` needs calibration inputs."""
        specs = [self.weights, *(rule.weights for rule in self.layers), self.embedding]
        static = self.activations is not None and self.activations.static
        return (
            static or self.smooth is not None or any(s is not None and s.calibrated for s in specs)
        )

    def for_layer(self, *names: str) -> WeightSpec | None:
        """Return the spec of the layer with these names (scope, path, …); None: it is kept."""
        for rule in self.layers:
            if any(fnmatch.fnmatchcase(name, rule.match) for name in names):
                return rule.weights
        return self.weights

    @property
    def name(self) -> str:
        """Short name in messages: int8-channel, uint4-g64-gptq+a8."""
        spec = self.weights
        kind = _granularity_name(spec.granularity)
        parts = [
            spec.format.name,
            f"g{spec.granularity.size}" if isinstance(spec.granularity, PerGroup) else kind,
        ]
        parts += [part for part in (spec.method, spec.clip) if part not in ("nearest", "none")]
        extra = "" if self.activations is None else f"+a{self.activations.format.bits}"
        return "-".join(parts) + extra

    @classmethod
    def named(cls, name: str) -> "Recipe":
        """Return the plain recipe called int8-channel, int4-tensor, int4-g64, uint4-g64, ….

        Raises ValueError naming what is allowed.
        """
        found = re.fullmatch(r"(u?int[2-8])-(?:(channel|tensor)|g(\d+))", name)
        if found is None:
            raise ValueError(
                f"unknown recipe {name!r}; allowed are FORMAT-channel, FORMAT-tensor and FORMAT-gN "
                "with a group size N and a format int2 … int8 (symmetric) or uint2 … uint8 "
                "(asymmetric), e.g. int4-g64."
            )
        fmt = INT_FORMATS[found[1]]
        whole: Granularity = PerTensor() if found[2] == "tensor" else PerChannel()
        granularity = whole if found[3] is None else PerGroup(int(found[3]))
        return cls(WeightSpec(fmt, granularity, "none" if fmt.symmetric else "integer"))

    def to_json(self) -> dict[str, object]:
        """Return what makes two recipes the same."""
        described = {**self.weights.to_json(), "exclude": list(self.exclude)}
        if self.layers:
            described["layers"] = [
                {"match": rule.match, **({} if rule.weights is None else rule.weights.to_json())}
                for rule in self.layers
            ]
        if self.embedding is not None:
            described["embedding"] = self.embedding.to_json()
        if self.activations is not None:
            described["activations"] = self.activations.to_json()
        if self.smooth is not None:
            described["smooth"] = self.smooth
        if self.rotation is not None:
            described["rotation"] = asdict(self.rotation)
        if self.residual_dtype:
            described["residual_dtype"] = {glob: _dtype_name(d) for glob, d in self.residual_dtype}
        return described

    def with_weights(self, **changes: object) -> "Recipe":
        """Return the same recipe with other properties of its default weights."""
        return replace(self, weights=replace(self.weights, **changes))  # type: ignore[arg-type]
