"""How a candidate is served: the paths of a serving engine that change numbers.

Names of KV caches are those of `quantwatch_kernels.serve`, which pages of the dashboard, that read
configurations too, must not import. A test holds both against each other.
"""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from quantwatch.config.base import Strict
from quantwatch.config.recipe_parts import CalibrationConfig

KV_CACHES = (
    "float16", "bfloat16", "int8", "int8-centered", "int8-symmetric", "int8-plain", "int8-chunk",
    "int8-chunk-r4", "int8-r4", "int8-policy", "kivi8", "int4-symmetric",
    "int4-plain", "int4-g32", "int4-hadamard", "int4", "int4-centered", "k5v4", "int4-window",
    "kivi4", "kivi4-window", "kivi4-r4", "kivi2", "kivi2-r4", "int2", "int2-plain",
)  # fmt: skip
"""Schemes by name, as `quantwatch_kernels.serve.kv_scheme` has them."""
_OPTION = re.compile(r"(high)\d+(?:,\d+)*|(sinks|window)\d+|(top|r)0*[1-9]\d*|(gain)", re.ASCII)
"""What may follow behind +, as `kv_options` has it."""


def _options(name: str) -> set[str]:
    """Return the kinds of options of a KV cache's name. Raises ValueError for others, or twice."""
    seen = set[str]()
    for option in name.split("+")[1:]:
        if (found := _OPTION.fullmatch(option)) is None:
            raise ValueError(
                f"{name!r}: after + comes highN,M…, sinksN, windowN, topN, rN or gain, N "
                f"from 1 in topN and rN; not {option!r}"
            )
        kind = next(filter(None, found.groups()))
        if kind in seen:
            raise ValueError(f"{name!r}: {kind} is said twice")
        seen.add(kind)
    return seen


Int8Attention = Literal[
    "int8-plain", "int8-token", "int8-smooth", "int8-smooth-token", "int8-query",
    "int8-smooth-query", "int8-both", "int8-smooth-both",
]  # fmt: skip
"""Scores by name, as `quantwatch_kernels.serve.attention_int8` has them."""


class ServeConfig(Strict):
    """What a model runs through beside its weights: a cache or an attention, experts, or both."""

    kv_cache: str | None = Field(
        default=None,
        description="A quantized KV cache by its name, e.g. int8, int4, kivi2: see `kernels table "
        "kv`. Options follow behind +: `int4+high0,1` keeps the cache of layers 0 and 1 in full "
        "precision, `+sinks4` the first 4 tokens, `+window32` the newest 32; `+top4` reads the "
        "keys of 4 pages of 16 tokens, those a query attends to most, in full precision; `+r4` "
        "keeps the rounding error as a product of rank 4; `+gain` multiplies by calibrated gains. "
        "Each query reads codes or full precision as it would when tokens come one by one.",
    )
    calibration: CalibrationConfig | None = Field(
        default=None, description="Texts that the gains of a `+gain` cache are found on."
    )
    attention: Int8Attention | None = Field(
        default=None,
        description="Attention whose scores come from int8 codes: int8-plain (a scale per tensor), "
        "int8-token (per token), int8-smooth (the keys' mean taken off), int8-query (the query's "
        "rounding error added back), int8-both (the keys', too), int8-smooth-token, "
        "int8-smooth-query, int8-smooth-both: see `kernels table attention`.",
    )
    experts: Literal["int8", "int4", "int4-a4"] | None = Field(
        default=None,
        description="Stacked experts as codes through the grouped product: int8 per output, int4 "
        "in groups of 32, or int4-a4 with the rows that meet them in 4 bits, too. Router and "
        "shared experts stay as they are.",
    )

    @property
    def attends(self) -> bool:
        """Whether the model's own attention is replaced."""
        return self.kv_cache is not None or self.attention is not None

    @field_validator("kv_cache")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is None:
            return None
        base, options = name.split("+", maxsplit=1)[0], _options(name)
        if base not in KV_CACHES:
            raise ValueError(f"{base!r} is no KV cache; allowed: {', '.join(KV_CACHES)}")
        if "float" in base and options & {"r", "gain", "top"}:
            raise ValueError(f"{name!r}: {base} has no codes, so nothing to compensate")
        return name

    @model_validator(mode="after")
    def _something(self) -> "ServeConfig":
        if not self.attends and self.experts is None:
            raise ValueError("serve names nothing: give kv_cache or attention, experts, or both")
        if self.kv_cache is not None and self.attention is not None:
            raise ValueError("kv_cache and attention both replace the attention: give one of them")
        return self

    @model_validator(mode="after")
    def _calibrated(self) -> "ServeConfig":
        gain = self.kv_cache is not None and "gain" in _options(self.kv_cache)
        if gain and self.calibration is None:
            raise ValueError(f"kv_cache = {self.kv_cache!r} needs calibration, for its gains")
        if not gain and self.calibration is not None:
            raise ValueError("calibration is given, but this cache has no gain that uses it")
        return self
