"""Quantization recipes: the table, and the names it goes by."""

from typing import Literal

from pydantic import Field, model_validator

from quantwatch.config.base import Strict
from quantwatch.errors import ConfigError


class RecipeConfig(Strict):
    """How weights are quantized."""

    weights: Literal["int8", "int4"] = Field(description="Weight format.")
    granularity: Literal["channel", "group"] = Field(
        description="One scale per output channel, or per group of inputs."
    )
    group_size: int | None = Field(
        default=None,
        ge=8,
        le=4096,
        description='Inputs per scale; needed by and only allowed with granularity = "group".',
    )
    exclude: tuple[str, ...] = Field(
        default=("head", "router"),
        description="Scopes (globs) left in full precision; norms and embeddings always are.",
    )

    @model_validator(mode="after")
    def _group_only_with_group(self) -> "RecipeConfig":
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError(
                'group_size is required with granularity = "group" and not allowed with "channel"'
            )
        return self


RECIPES: dict[str, RecipeConfig] = {
    "int8-channel": RecipeConfig(weights="int8", granularity="channel"),
    "int4-g32": RecipeConfig(weights="int4", granularity="group", group_size=32),
    "int4-g64": RecipeConfig(weights="int4", granularity="group", group_size=64),
    "int4-g128": RecipeConfig(weights="int4", granularity="group", group_size=128),
}


def recipe_config(recipe: RecipeConfig | str) -> RecipeConfig:
    """Return the recipe that a name stands for; raises ConfigError listing the known names."""
    if isinstance(recipe, RecipeConfig):
        return recipe
    if recipe not in RECIPES:
        raise ConfigError(
            f"unknown recipe {recipe!r}; known names: {', '.join(RECIPES)}; "
            "or write a table with weights, granularity and group_size"
        )
    return RECIPES[recipe]


def recipe_name(recipe: RecipeConfig) -> str | None:
    """Return the name of a recipe, None when it has none."""
    return next((name for name, known in RECIPES.items() if known == recipe), None)
