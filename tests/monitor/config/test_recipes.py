"""Recipes: names, tables, files."""

from pathlib import Path

import pytest

from quantwatch.config.recipes import (
    RECIPES,
    RecipeConfig,
    recipe_config,
    recipe_digest,
    recipe_name,
)
from quantwatch.errors import ConfigError


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_stands_for_one_recipe_and_back(name: str) -> None:
    """Catches two names for one recipe, or a name that lies about its group size."""
    recipe = recipe_config(name)
    assert recipe_name(recipe) == name
    weights, _, rest = name.partition("-")
    group = None if rest == "channel" else int(rest.removeprefix("g"))
    assert (recipe.weights, recipe.group_size) == (weights, group)


def test_a_table_is_taken_as_it_is_and_has_no_name() -> None:
    """Catches a table being replaced by the nearest named recipe."""
    table = RecipeConfig(weights="int4", granularity="group", group_size=64, exclude=())
    assert recipe_config(table) is table
    assert recipe_name(table) is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    """Catches a KeyError."""
    with pytest.raises(ConfigError, match="int8-channel, int4-g32, int4-g64, int4-g128"):
        recipe_config("int4")


WHOLE = """
weights = "uint4"
granularity = "group"
group_size = 64
clip = "mse"
method = "gptq"
scale_dtype = "float16"
smooth = 0.5
embedding = { weights = "int8", granularity = "channel" }
layers = [
  { match = "layers.0.*" },
  { match = "*.down_proj", weights = "uint5", granularity = "group", group_size = 32 },
]
activations = { format = "uint8", granularity = "token" }
rotation = { values = true }
residual_dtype = [{ match = "layers.1", dtype = "bfloat16" }]
calibration = { suite = "core-v1", skip = 8, limit = 16 }
"""


def test_a_file_holds_a_whole_recipe(tmp_path: Path) -> None:
    """Catches a key that is only read from the configuration's own tables."""
    (tmp_path / "w4.toml").write_text(WHOLE)
    recipe = recipe_config("w4.toml", tmp_path)
    assert recipe.layers[0].weights is None
    assert recipe.layers[1].weights == "uint5"
    assert recipe.calibration is not None
    assert recipe.calibration.suite.name == "core-v1"


FILES = {
    "missing": (None, "cannot be read"),
    "no TOML": ("weights = ", "not valid TOML"),
    "unknown key": ('weights = "int8"\ngranularity = "channel"\nbits = 8', "bits: unknown key"),
    "wrong format": ('weights = "int1"\ngranularity = "channel"', "int1"),
    "group without size": ('weights = "int4"\ngranularity = "group"', "group_size is required"),
    "zero of a symmetric format": (
        'weights = "int4"\ngranularity = "channel"\nzero = "float"',
        "zero belongs to an asymmetric format",
    ),
    "hqq without a float zero": (
        'weights = "uint4"\ngranularity = "channel"\nmethod = "hqq"',
        'needs an asymmetric format with zero = "float"',
    ),
    "gptq without texts": (
        'weights = "int4"\ngranularity = "channel"\nmethod = "gptq"',
        "gptq needs calibration",
    ),
    "texts for nothing": (
        'weights = "int4"\ngranularity = "channel"\ncalibration = { suite = "core-v1" }',
        "nothing in this recipe uses it",
    ),
    "static per token": (
        'weights = "int8"\ngranularity = "channel"\nactivations = { format = "int8", static = true }',
        "static = true needs granularity",
    ),
    "static and clipped": (
        'weights = "int8"\ngranularity = "channel"\nactivations = { format = "int8", '
        'granularity = "tensor", static = true, clip_ratio = 0.9 }',
        "clip_ratio belongs to dynamic ranges",
    ),
    "steps of a channel": (
        'weights = "int4"\ngranularity = "channel"\nscales = "stepped"',
        'needs int4 or uint4 with granularity = "group"; it is int4 with channel',
    ),
    "steps in 8 bits": (
        'weights = "int8"\ngranularity = "group"\ngroup_size = 64\nscales = "stepped"',
        "it is int8 with group",
    ),
    "steps and a float zero": (
        'weights = "uint4"\ngranularity = "group"\ngroup_size = 64\nscales = "stepped"\n'
        'zero = "float"',
        'not allowed with zero = "float"',
    ),
    "steps, stochastic": (
        'weights = "int4"\ngranularity = "group"\ngroup_size = 64\nscales = "stepped"\n'
        'rounding = "stochastic"',
        'not allowed with rounding = "stochastic"',
    ),
    "steps and float inputs": (
        'weights = "int4"\ngranularity = "group"\ngroup_size = 64\nscales = "stepped"',
        "needs activations in int8 or uint8",
    ),
    "steps and inputs in groups": (
        'weights = "int4"\ngranularity = "group"\ngroup_size = 64\nscales = "stepped"\n'
        'activations = { format = "int8", granularity = "group", group_size = 64 }',
        "needs activations in int8 or uint8",
    ),
    "steps of an embedding": (
        'weights = "int4"\ngranularity = "channel"\nactivations = { format = "int8" }\n'
        'embedding = { weights = "int4", granularity = "group", group_size = 64, '
        'scales = "stepped" }',
        "for linear layers only",
    ),
    "details of a layer that is kept": (
        'weights = "int8"\ngranularity = "channel"\nlayers = [{ match = "x", clip = "mse" }]',
        "clip needs weights",
    ),
}


@pytest.mark.parametrize(("text", "words"), FILES.values(), ids=FILES)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str | None, words: str) -> None:
    """Catches a recipe that fails after the models were loaded, or is half understood."""
    if text is not None:
        (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        recipe_config("r.toml", tmp_path)
    assert "r.toml" in str(caught.value)


PLAIN = "3e5300281c1be64bbe61dc8ef17fa1482c2d40b95669fe06dd91c46482875864"
"""Digest of int4-g64 in the databases of quantwatch 0.1."""


def test_a_digest_knows_only_what_is_written() -> None:
    """Catches a stored fingerprint that changes because quantwatch learnt a new key."""
    plain = recipe_config("int4-g64")
    assert recipe_digest(plain) == PLAIN
    changed = plain.model_copy(update={"clip": "mse"})
    assert recipe_digest(changed) != PLAIN
