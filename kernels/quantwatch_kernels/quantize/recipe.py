"""How a whole model is quantized: values that fail on construction, not strings and booleans."""

import fnmatch
import re
from dataclasses import asdict, dataclass, replace

import torch

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.specs import (
    ActivationSpec,
    Granularity,
    Method,
    PerChannel,
    PerGroup,
    PerTensor,
    RotationSpec,
    WeightSpec,
    dtype_name,
    granularity_name,
)

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
    """(glob over layers, dtype) of the residual stream that leaves the layer; the first decides."""

    def __post_init__(self) -> None:
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise ValueError(f"smooth lies in 0 … 1; it is {self.smooth}.")
        self._check_stepped()

    def _check_stepped(self) -> None:
        """Stepped scales are kept by layers that multiply integers, and by no others."""
        if self.embedding is not None and self.embedding.scales == "stepped":
            raise ValueError("the embedding is looked up: it can't have stepped scales.")
        specs = [self.weights, *(rule.weights for rule in self.layers)]
        asked = any(spec is not None and spec.scales == "stepped" for spec in specs)
        if asked and not (self.activations is not None and self.activations.by_token(8)):
            raise ValueError(
                "stepped scales are for products in integers: they need dynamic activations in 8 "
                "bits with a scale per token."
            )

    @property
    def calibrated(self) -> bool:
        """Whether `quantize_` needs calibration inputs."""
        specs = [self.weights, *(rule.weights for rule in self.layers), self.embedding]
        static = self.activations is not None and self.activations.static
        return (
            static or self.smooth is not None or any(s is not None and s.calibrated for s in specs)
        )

    @property
    def changes_model(self) -> bool:
        """Whether the model is rotated or smoothed before its weights are rounded."""
        return self.rotation is not None or self.smooth is not None

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
        kind = granularity_name(spec.granularity)
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
            # A list, since the first glob that matches decides: JSON objects have no order.
            described["residual_dtype"] = [
                {"match": glob, "dtype": dtype_name(dtype)} for glob, dtype in self.residual_dtype
            ]
        return described

    def with_weights(self, **changes: object) -> "Recipe":
        """Return the same recipe with other properties of its default weights."""
        return replace(self, weights=replace(self.weights, **changes))  # type: ignore[arg-type]
