"""Recipe names."""

import pytest

from quantwatch.config.recipes import RECIPES, RecipeConfig, recipe_config, recipe_name
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
