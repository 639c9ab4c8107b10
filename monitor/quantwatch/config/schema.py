"""quantwatch.toml, `schema_version = 1`: checks as code. Unknown keys are errors.

Each field carries its explanation; docs/settings.md is checked against them by a test.
"""

import json
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from quantwatch.config.base import MOST_THREADS, Name, Strict
from quantwatch.config.canary import CanaryConfig
from quantwatch.config.dashboard import DashboardConfig, GrantsConfig
from quantwatch.config.executors import Executor, executor_problem
from quantwatch.config.lens import Products, lens_problem
from quantwatch.config.recipes import RecipeConfig
from quantwatch.config.rules import RuleConfig, RuleOverride, Statistic
from quantwatch.config.service import CacheConfig, EndpointConfig, RetentionConfig, ServiceConfig
from quantwatch.config.suites import SuiteConfig, named_suite
from quantwatch.config.variants import Dtype, FaultConfig, VariantConfig
from quantwatch.config.watching import AlertingConfig, BaselineConfig, ScheduleConfig

__all__ = [
    "AlertingConfig",
    "BaselineConfig",
    "CacheConfig",
    "CanaryConfig",
    "CandidateConfig",
    "CheckConfig",
    "Config",
    "DashboardConfig",
    "DatabaseConfig",
    "Dtype",
    "EndpointConfig",
    "FaultConfig",
    "GrantsConfig",
    "Name",
    "RecipeConfig",
    "RetentionConfig",
    "RuleConfig",
    "RuleOverride",
    "ScheduleConfig",
    "ServiceConfig",
    "Statistic",
    "Strict",
    "SuiteConfig",
    "VariantConfig",
]


def _whole(value: object) -> object:
    """`Literal[1]` takes whatever equals 1: true and 1.0, too."""
    if type(value) is not int:
        raise ValueError(f"{json.dumps(value, default=str)} is not allowed; allowed: 1")
    return value


def _unique(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} names must be unique; twice: {', '.join(twice)}")


class CandidateConfig(VariantConfig):
    """A candidate: a variant with a name and, if wanted, rules of its own."""

    name: Name = Field(description="Shown everywhere; unique in the check.")
    rules: tuple[RuleOverride, ...] = Field(
        default=(), description="Rules for this candidate alone; same name changes the check's."
    )

    @field_validator("name")
    @classmethod
    def _not_the_reference(cls, name: str) -> str:
        # The reference's own noise floor is stored under that name.
        if name == "reference":
            raise ValueError('"reference" is not allowed; it names the other side')
        return name

    @field_validator("rules")
    @classmethod
    def _unique_rules(cls, rules: tuple[RuleOverride, ...]) -> tuple[RuleOverride, ...]:
        _unique("rule", [rule.name for rule in rules])
        return rules


class CheckConfig(Strict):
    """What to watch: one reference, one or more candidates, a suite, rules."""

    description: str = Field(default="", description="One line for people.")
    reference: VariantConfig = Field(description="The model that is right.")
    candidates: tuple[CandidateConfig, ...] = Field(
        min_length=1, description="The models that are watched."
    )
    suite: Annotated[SuiteConfig, BeforeValidator(named_suite)] = Field(
        description="A table, or the name of a shipped suite."
    )
    rules: tuple[RuleOverride, ...] = Field(
        default=(), description="Added to the default rules; same name changes the default."
    )
    lens_positions: int = Field(
        default=8,
        ge=0,
        description="Positions per 256 tokens at which every layer is read through the lens; 0 "
        "switches it off.",
    )
    lens: Literal["sampled", "estimated"] = Field(
        default="sampled",
        description="estimated: beside the exact sample, every layer's KL at every token is "
        "estimated from 160 logits; the first run reads the reference's layers in full.",
    )
    lens_products: Products = Field(
        default="float32",
        description="int16: the lens multiplies 16-bit integers with a step per 32 inputs, in "
        "two thirds of the time; a token's per-layer KL is then off by a seventieth of a "
        "percent in the median, as measured on SmolLM2-135M (docs/performance.md). bfloat16: in "
        "little more than half the time, off by half a percent.",
    )
    isolated_fraction: float = Field(
        default=0.125,
        ge=0,
        le=1,
        description="Share of the tokens (whole prompts) on which isolated errors are measured; 0 "
        "switches them off.",
    )
    batch_tokens: int = Field(default=256, ge=1, description="Padded tokens per batch.")
    prefill_chunk: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per chunk of a prompt longer than that: memory then doesn't grow with "
        "it beyond the KV caches; whole prompts at once when absent.",
    )
    memory: Literal["resident", "streamed"] = Field(
        default="resident",
        description="resident: whole models in memory; streamed: one decoder layer at a time, for "
        "models larger than it.",
    )
    reference_cache: bool = Field(
        default=False,
        description="Record the reference's hidden states on the first night and read them on "
        "later ones, with the same numbers; takes disk (docs/performance.md).",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=MOST_THREADS,
        description="CPU threads; all cores but never more than physical ones when absent.",
    )
    executor: Executor = Field(
        default="inline",
        description="Who measures the batches, to the same numbers: inline: one process; local: "
        "several of this machine; ray: workers of a Ray cluster (docs/executors.md).",
    )
    shards: int | None = Field(
        default=None,
        ge=1,
        le=MOST_THREADS,
        description="Processes of local or ray, each with so many threads; as many as the cores "
        "allow when absent.",
    )
    ray_address: str | None = Field(
        default=None,
        description="Ray cluster to join, e.g. auto; one of this run's own when absent.",
    )
    store_text: bool = Field(
        default=True, description="Keep prompt text and token pieces in the database."
    )
    allow_beyond_context: bool = Field(
        default=False, description="Measure prompts longer than the model's context."
    )
    tags: tuple[Name, ...] = Field(default=(), description="For filters.")
    schedule: ScheduleConfig | None = Field(
        default=None, description="When the service runs it; only on request when absent."
    )
    baseline: BaselineConfig = Field(
        default=BaselineConfig(), description="What its runs are compared with."
    )
    alerting: AlertingConfig = Field(default=AlertingConfig(), description="How it alerts.")
    canary: CanaryConfig | None = Field(
        default=None,
        description="A fault that is planted in a copy to prove that it is found; none when "
        "absent.",
    )

    @field_validator("reference")
    @classmethod
    def _runs_here(cls, reference: VariantConfig) -> VariantConfig:
        if reference.served is not None:
            raise ValueError("served is for candidates: all of the reference's logits are needed")
        return reference

    @model_validator(mode="after")
    def _settings_agree(self) -> "CheckConfig":
        for problem in (lens_problem(self), executor_problem(self)):
            if problem is not None:
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _unique_names(self) -> "CheckConfig":
        _unique("candidate", [candidate.name for candidate in self.candidates])
        _unique("rule", [rule.name for rule in self.rules])
        return self


class DatabaseConfig(Strict):
    """Where results are kept."""

    url: str | None = Field(
        default=None,
        description="SQLAlchemy URL (sqlite or postgresql); QUANTWATCH_DATABASE_URL wins. SQLite "
        "in the user's data folder when absent.",
    )


class Config(Strict):
    """A whole quantwatch.toml."""

    schema_version: Annotated[Literal[1], BeforeValidator(_whole)] = Field(description="Always 1.")
    database: DatabaseConfig = Field(
        default=DatabaseConfig(), description="Where results are kept."
    )
    checks: dict[Name, CheckConfig] = Field(default_factory=dict, description="Checks by name.")
    endpoints: dict[Name, EndpointConfig] = Field(
        default_factory=dict, description="Receivers of alerts by name."
    )
    service: ServiceConfig = Field(
        default=ServiceConfig(), description="How `quantwatch start` runs."
    )
    retention: RetentionConfig = Field(
        default=RetentionConfig(), description="How long results stay."
    )
    cache: CacheConfig = Field(
        default=CacheConfig(), description="How much disk recorded references may take."
    )
    dashboard: DashboardConfig = Field(
        default=DashboardConfig(), description="What those who sign in to the pages may do."
    )

    @model_validator(mode="after")
    def _known_endpoints(self) -> "Config":
        for name, check in self.checks.items():
            unknown = set(check.alerting.endpoints or ()) - self.endpoints.keys()
            if unknown:
                raise ValueError(
                    f"checks.{name}.alerting.endpoints: {sorted(unknown)[0]!r} is unknown; known: "
                    f"{', '.join(self.endpoints) or 'none'}"
                )
        return self
