"""Apply a quantization recipe to a loaded model."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from quantwatch.config.schema import RecipeConfig
from quantwatch.models.anatomy import Anatomy
from quantwatch.models.quiet import explained, shorten
from quantwatch_kernels.formats import INT4, INT8
from quantwatch_kernels.quantize.api import Execution, QuantReport, quantize_
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, Recipe, WeightSpec

_FORMATS = {"int8": INT8, "int4": INT4}


def apply_recipe(
    module: nn.Module, config: RecipeConfig, execution: Execution, anatomy: Anatomy
) -> QuantReport:
    """Quantize a model's weights in place; raises ModelError when the recipe doesn't fit it."""
    recipe = _recipe(config, anatomy)
    scopes = {path: str(scope) for path, scope in anatomy.scopes_by_path.items()}
    with explained("the recipe can't be applied"):
        report = quantize_(module, recipe, execution=execution, scopes=scopes)
    skipped = tuple((_scoped(name, scopes), reason) for name, reason in report.skipped)
    return replace(report, skipped=skipped)


def _scoped(name: str, scopes: Mapping[str, str]) -> str:
    """Turn the path of a weight inside a tap into a scope: fused experts have none of their own."""
    inside = [path for path in scopes if name.startswith(f"{path}.")]
    path = max(inside, key=len, default=None)
    return name if path is None else f"{scopes[path]}{name[len(path) :]}"


def fallback_notes(report: QuantReport) -> tuple[str, ...]:
    """Say which layers are computed dequantized because their kernel doesn't apply, and why."""
    reasons = dict.fromkeys(reason for _, reason in report.fallbacks)
    return tuple(
        f"computed dequantized, since {reason}: "
        + shorten([scope for scope, other in report.fallbacks if other == reason])
        for reason in reasons
    )


def _recipe(config: RecipeConfig, anatomy: Anatomy) -> Recipe:
    group = config.group_size
    # "router" stands for the routing layers, whose scopes depend on the model.
    routers = sorted(anatomy.routers) if "router" in config.exclude else []
    return Recipe(
        WeightSpec(_FORMATS[config.weights], PerChannel() if group is None else PerGroup(group)),
        exclude=(*config.exclude, *routers),
    )
