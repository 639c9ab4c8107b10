"""The parts of a quantization recipe: weights, rules per layer, activations, calibration."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from quantwatch.config.base import Strict
from quantwatch.config.suites import SuiteConfig, named_suite

WeightFormat = Literal[
    "int8", "int4", "int2", "int3", "int5", "int6", "int7",
    "uint8", "uint7", "uint6", "uint5", "uint4", "uint3", "uint2",
]  # fmt: skip
FloatName = Literal["float32", "bfloat16", "float16"]


class WeightsConfig(Strict):
    """How weight matrices are quantized."""

    weights: WeightFormat = Field(
        description="int2 … int8 (symmetric) or uint2 … uint8 (asymmetric, with a zero point)."
    )
    granularity: Literal["tensor", "channel", "group"] = Field(
        description="One scale per matrix, per output channel, or per group of inputs."
    )
    group_size: int | None = Field(
        default=None,
        ge=8,
        le=4096,
        description='Inputs per scale; needed by and only allowed with granularity = "group".',
    )
    zero: Literal["integer", "float"] | None = Field(
        default=None,
        description="Zero point of an asymmetric format: integer (when absent) or float.",
    )
    clip: Literal["none", "mse"] = Field(
        default="none", description="mse: search the range with the least squared error."
    )
    method: Literal["nearest", "gptq", "awq", "hqq"] = Field(
        default="nearest",
        description="How codes are chosen. gptq and awq need calibration, hqq a float zero.",
    )
    scale_dtype: FloatName = Field(
        default="float32", description="Dtype in which scales (and float zeros) are stored."
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description='stochastic (seeded) only with method = "nearest".'
    )
    scales: Literal["free", "stepped"] = Field(
        default="free",
        description="stepped: int4 or uint4 groups whose scales are multiples of one per channel, "
        "so that 8-bit activations are multiplied in integers.",
    )

    @model_validator(mode="after")
    def _possible(self) -> "WeightsConfig":
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError(
                'group_size is required with granularity = "group" and not allowed otherwise'
            )
        if self.zero is not None and not self.weights.startswith("u"):
            raise ValueError(f"zero belongs to an asymmetric format, not to {self.weights}")
        if self.method == "hqq" and self.zero != "float":
            raise ValueError('method = "hqq" needs an asymmetric format with zero = "float"')
        if self.rounding == "stochastic" and self.method != "nearest":
            raise ValueError(f'rounding = "stochastic" is not allowed with method = {self.method}')
        if self.scales == "stepped":
            self._check_stepped()
        return self

    def _check_stepped(self) -> None:
        if self.weights not in ("int4", "uint4") or self.granularity != "group":
            raise ValueError(
                'scales = "stepped" needs int4 or uint4 with granularity = "group"; it is '
                f"{self.weights} with {self.granularity}"
            )
        for key, wrong in (("zero", "float"), ("rounding", "stochastic")):
            if getattr(self, key) == wrong:
                raise ValueError(f'scales = "stepped" is not allowed with {key} = "{wrong}"')


def _changed(section: Strict) -> set[str]:
    """Return the keys that don't have their default."""
    return set(section.model_dump(exclude_defaults=True))


class LayerConfig(WeightsConfig):
    """Other weights for some layers, or none."""

    match: str = Field(min_length=1, description="Scopes (globs), e.g. layers.*.mlp.down_proj.")
    weights: WeightFormat | None = Field(  # type: ignore[assignment]
        default=None, description="Weight format; absent: these layers stay as they are."
    )
    granularity: Literal["tensor", "channel", "group"] = Field(
        default="channel", description="As above."
    )

    @model_validator(mode="after")
    def _possible(self) -> "LayerConfig":
        if self.weights is None:
            # Not what was written: a stored recipe writes every key.
            extra = _changed(self) - {"match"}
            if extra:
                raise ValueError(f"{', '.join(sorted(extra))} needs weights")
            return self
        super()._possible()  # type: ignore[operator]
        return self


class ResidualConfig(Strict):
    """The dtype of the residual stream that leaves some layers."""

    match: str = Field(min_length=1, description="Layers (globs): layers.1*, or the number alone.")
    dtype: FloatName = Field(description="float32, bfloat16 or float16.")


class ActivationsConfig(Strict):
    """How the inputs of quantized layers are quantized."""

    format: WeightFormat = Field(description="int2 … int8 or uint2 … uint8.")
    granularity: Literal["tensor", "token", "group"] = Field(
        default="token",
        description="One scale for all of it, per token, or per token and group of inputs.",
    )
    group_size: int | None = Field(default=None, ge=8, le=4096, description="Inputs per scale.")
    static: bool = Field(
        default=False, description="Scales from calibration, per tensor, instead of each input."
    )
    observer: Literal["minmax", "moving_average", "histogram", "mse", "percentile"] = Field(
        default="minmax", description="How static scales are found."
    )
    clip_ratio: float = Field(
        default=1.0, gt=0, le=1, description="Share of a dynamic range that is kept."
    )

    @model_validator(mode="after")
    def _possible(self) -> "ActivationsConfig":
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError('group_size goes with granularity = "group" and only with it')
        if self.static and self.granularity != "tensor":
            raise ValueError('static = true needs granularity = "tensor"')
        if self.static and self.clip_ratio != 1:
            raise ValueError("clip_ratio belongs to dynamic ranges, not to static = true")
        return self


class RotationConfig(Strict):
    """Orthogonal rotations that leave the float model what it is."""

    residual: bool = Field(default=True, description="The residual stream, folded into weights.")
    values: bool = Field(default=False, description="Each head's values, folded into weights.")
    down: bool = Field(default=False, description="Input of the down projection, done online.")
    seed: int = Field(default=0, ge=0, description="Of the random signs.")
    block: int | None = Field(
        default=None, ge=2, description="Width of a block-diagonal rotation; absent: all of it."
    )


Selection = Literal["first", "random", "entropy-attention", "hierarchical", "coverage", "extremes"]


class CalibrationConfig(Strict):
    """The texts on which scales are found; a check that measures them warns of it."""

    suite: Annotated[SuiteConfig, BeforeValidator(named_suite)] = Field(
        description="As a check's suite."
    )
    skip: int = Field(default=0, ge=0, description="Prompts or windows to leave out at the start.")
    limit: int = Field(default=64, ge=1, description="Prompts or windows to use after that.")
    selection: Selection = Field(
        default="first",
        description="Which of them: first (in order), or limit of all the rest of the suite by "
        "random, entropy-attention, hierarchical, coverage or extremes.",
    )
    seed: int = Field(default=0, ge=0, description="Of the draw that random and hierarchical make.")

    @model_validator(mode="after")
    def _drawn(self) -> "CalibrationConfig":
        if self.seed and self.selection not in ("random", "hierarchical"):
            raise ValueError(f"seed is not allowed with selection = {self.selection!r}: no draw")
        return self
