"""How a candidate is served: the paths of a serving engine that change numbers."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from quantwatch.config.base import Strict

KV_CACHES = (
    "int8", "int8-centered", "int8-symmetric", "int8-plain", "kivi8", "int4-symmetric",
    "int4-plain", "int4-g32", "int4-hadamard", "int4", "int4-centered", "int4-window", "kivi4",
    "kivi4-window", "kivi4-r4", "kivi2", "kivi2-r4", "int2", "int2-plain",
)  # fmt: skip
"""Schemes by name, as `quantwatch_kernels.serve.kv_scheme` has them; here no torch is imported."""


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
        "kv`. `int4+high0,1` keeps the cache of layers 0 and 1 in full precision. Each query reads "
        "codes or full precision as it would when tokens come one by one.",
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
        base, plus, rest = name.partition("+")
        if base not in KV_CACHES:
            raise ValueError(f"{base!r} is no KV cache; allowed: {', '.join(KV_CACHES)}")
        numbers = rest.removeprefix("high").split(",")
        if plus and not (rest.startswith("high") and all(part.isdecimal() for part in numbers)):
            raise ValueError(f"{name!r}: after + comes highN,M…, layers in full precision")
        return name

    @model_validator(mode="after")
    def _something(self) -> "ServeConfig":
        if not self.attends and self.experts is None:
            raise ValueError("serve names nothing: give kv_cache or attention, experts, or both")
        if self.kv_cache is not None and self.attention is not None:
            raise ValueError("kv_cache and attention both replace the attention: give one of them")
        return self
