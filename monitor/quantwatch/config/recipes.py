"""Quantization recipes: a table, a file that holds one, or a name."""

import os
from pathlib import Path

from pydantic import Field, model_validator

from quantwatch.config.parsing import parse, read_toml
from quantwatch.config.recipe_parts import (
    ActivationsConfig,
    CalibrationConfig,
    LayerConfig,
    ResidualConfig,
    RotationConfig,
    WeightsConfig,
)
from quantwatch.errors import ConfigError
from quantwatch.telemetry import canonical_sha


class RecipeConfig(WeightsConfig):
    """How a model is quantized."""

    exclude: tuple[str, ...] = Field(
        default=("head", "router"),
        description="Scopes (globs) left in full precision; norms always are.",
    )
    layers: tuple[LayerConfig, ...] = Field(
        default=(), description="Other weights for some layers; the first that matches decides."
    )
    embedding: WeightsConfig | None = Field(
        default=None,
        description="Weights of the embedding and of a head tied to it; absent: left as it is.",
    )
    activations: ActivationsConfig | None = Field(
        default=None, description="Inputs of the quantized layers; absent: left as they are."
    )
    smooth: float | None = Field(
        default=None, ge=0, le=1, description="SmoothQuant's alpha; needs calibration."
    )
    rotation: RotationConfig | None = Field(
        default=None, description="Rotations before quantizing; absent: none."
    )
    residual_dtype: tuple[ResidualConfig, ...] = Field(
        default=(),
        description="Dtype of the residual stream behind layers; the first that matches decides.",
    )
    calibration: CalibrationConfig | None = Field(
        default=None, description="Texts for methods that need them."
    )

    @model_validator(mode="after")
    def _calibrated(self) -> "RecipeConfig":
        needs: list[str] = [spec.method for spec in self._specs() if spec.method in ("gptq", "awq")]
        if self.smooth is not None:
            needs.append("smooth")
        if self.activations is not None and self.activations.static:
            needs.append("static activations")
        if needs and self.calibration is None:
            raise ValueError(f"{needs[0]} needs calibration")
        if not needs and self.calibration is not None:
            raise ValueError("calibration is given, but nothing in this recipe uses it")
        return self

    @model_validator(mode="after")
    def _stepped(self) -> "RecipeConfig":
        if self.embedding is not None and self.embedding.scales == "stepped":
            raise ValueError('embedding: scales = "stepped" is for linear layers only')
        inputs = self.activations
        if any(spec.scales == "stepped" for spec in self._specs()) and (
            inputs is None
            or inputs.static
            or inputs.granularity != "token"
            or inputs.format not in ("int8", "uint8")
        ):
            raise ValueError(
                'scales = "stepped" needs activations in int8 or uint8, granularity = "token", '
                "not static"
            )
        return self

    def _specs(self) -> list[WeightsConfig]:
        embedding = [] if self.embedding is None else [self.embedding]
        return [self, *self.layers, *embedding]


RECIPES: dict[str, RecipeConfig] = {
    "int8-channel": RecipeConfig(weights="int8", granularity="channel"),
    "int4-g32": RecipeConfig(weights="int4", granularity="group", group_size=32),
    "int4-g64": RecipeConfig(weights="int4", granularity="group", group_size=64),
    "int4-g128": RecipeConfig(weights="int4", granularity="group", group_size=128),
}


def is_recipe_file(recipe: object) -> bool:
    """Say whether a recipe is written as the path of a file."""
    return isinstance(recipe, str) and recipe.endswith(".toml")


def recipe_config(recipe: RecipeConfig | str, base_dir: Path | None = None) -> RecipeConfig:
    """Return the recipe that a table, a name or a file (from `base_dir`) stands for.

    Raises ConfigError listing the known names, or what is wrong in the file.
    """
    if isinstance(recipe, RecipeConfig):
        return recipe
    if is_recipe_file(recipe):
        # Unlike Path's, this leaves ~nobody as it is: a file that isn't there, like any other.
        return load_recipe((base_dir or Path.cwd()) / os.path.expanduser(str(recipe)))
    if recipe not in RECIPES:
        raise ConfigError(
            f"unknown recipe {recipe!r}; known names: {', '.join(RECIPES)}; "
            "or write a table with weights, granularity and group_size, or name a .toml file"
        )
    return RECIPES[recipe]


def load_recipe(path: Path) -> RecipeConfig:
    """Read a recipe file: the keys of a recipe table at its top level. Raises ConfigError."""
    return parse(RecipeConfig, read_toml(path), str(path))


def recipe_name(recipe: RecipeConfig) -> str | None:
    """Return the name of a recipe, None when it has none."""
    return next((name for name, known in RECIPES.items() if known == recipe), None)


def recipe_digest(recipe: RecipeConfig) -> str:
    """Return the SHA-256 of what a recipe says; keys that are absent are no part of it.

    So a recipe keeps its digest when a later version of quantwatch knows more keys.
    """
    first = recipe.model_dump(
        mode="json", include={"weights", "granularity", "group_size", "exclude"}
    )
    rest = recipe.model_dump(mode="json", exclude_defaults=True)
    return canonical_sha(rest | first)
