"""Apply a quantization recipe to a loaded model."""

from quantwatch_kernels.formats import INT4, INT8
from quantwatch_kernels.quantize.api import QuantReport, quantize_
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, Recipe
from torch import nn

from quantwatch.config.schema import RecipeConfig
from quantwatch.models.anatomy import Anatomy
from quantwatch.models.quiet import explained

_FORMATS = {"int8": INT8, "int4": INT4}


def apply_recipe(
    module: nn.Module, config: RecipeConfig, execution: str, anatomy: Anatomy
) -> QuantReport:
    """Quantize a model's weights in place; raises ModelError when the recipe doesn't fit it."""
    recipe = _recipe(config, anatomy)
    with explained("the recipe can't be applied"):
        return quantize_(module, recipe, execution=execution, scopes=anatomy.scopes_by_path)


def _recipe(config: RecipeConfig, anatomy: Anatomy) -> Recipe:
    group = config.group_size
    # "router" stands for the routing layers, whose scopes depend on the model.
    routers = sorted(anatomy.routers) if "router" in config.exclude else []
    return Recipe(
        weights=_FORMATS[config.weights],
        granularity=PerChannel() if group is None else PerGroup(group),
        exclude=(*config.exclude, *routers),
    )
