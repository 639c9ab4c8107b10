"""How a candidate is served: the paths of a serving engine that change numbers."""

from pydantic import Field, field_validator, model_validator

from quantwatch.config.base import Strict
from quantwatch.config.recipe_parts import CalibrationConfig
from quantwatch_kernels.serve.kv_options import parse_name

KV_CACHES = (
    "float16", "bfloat16", "int8", "int8-centered", "int8-symmetric", "int8-plain", "int8-chunk",
    "int8-chunk-r4", "int8-r4", "int8-policy", "kivi8", "int4-symmetric",
    "int4-plain", "int4-g32", "int4-hadamard", "int4", "int4-centered", "k5v4", "int4-window", "kivi4",
    "kivi4-window", "kivi4-r4", "kivi2", "kivi2-r4", "int2", "int2-plain",
)  # fmt: skip
"""Schemes by name, as `quantwatch_kernels.serve.kv_scheme` has them; here no torch is imported."""


class ServeConfig(Strict):
    """What a model runs through beside its weights."""

    kv_cache: str = Field(
        description="A quantized KV cache by its name, e.g. int8, int4, kivi2: see `kernels table "
        "kv`. Options follow behind +: `int4+high0,1` keeps the cache of layers 0 and 1 in full "
        "precision, `+sinks4` the first 4 tokens, `+window32` the newest 32; `+top4` reads the "
        "keys of 4 pages of 16 tokens, those a query attends to most, in full precision; `+r4` "
        "keeps the rounding error as a product of rank 4; `+gain` multiplies by calibrated gains. "
        "Each query reads codes or full precision as it would when tokens come one by one."
    )
    calibration: CalibrationConfig | None = Field(
        default=None, description="Texts that the gains of a `+gain` cache are found on."
    )

    @field_validator("kv_cache")
    @classmethod
    def _known(cls, name: str) -> str:
        said = parse_name(name)
        if said.base not in KV_CACHES:
            raise ValueError(f"{said.base!r} is no KV cache; allowed: {', '.join(KV_CACHES)}")
        floats = "float" in said.base
        if floats and (said.rank or said.gain or said.top):
            raise ValueError(f"{name!r}: {said.base} has no codes, so nothing to compensate")
        return name

    @model_validator(mode="after")
    def _calibrated(self) -> "ServeConfig":
        gain = parse_name(self.kv_cache).gain
        if gain and self.calibration is None:
            raise ValueError(f"kv_cache = {self.kv_cache!r} needs calibration, for its gains")
        if not gain and self.calibration is not None:
            raise ValueError("calibration is given, but this cache has no gain that uses it")
        return self
