"""Which matrices of a model a recipe converts, and why every other one stays."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from quantwatch_kernels.quantize.recipe import Recipe, WeightSpec

__all__ = ["Layer", "Reasons", "Selection", "scope_names", "select"]

Reasons = tuple[tuple[str, str], ...]
"""(scope or path, reason) pairs."""

_ROUTER_NAMES = frozenset({"router", "gate", "shared_expert_gate"})


@dataclass(frozen=True, slots=True)
class Layer:
    """A matrix to convert: where it is, what it is called, how; its weight as [out, in]."""

    path: str
    name: str
    module: nn.Module
    spec: WeightSpec

    @property
    def transposed(self) -> bool:
        """Whether the module stores its weight as [in, out]."""
        return type(self.module).__name__ == "Conv1D"

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], sharing memory with the module's."""
        weight = self.module.get_parameter("weight").detach()
        return weight.T if self.transposed else weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias [out] or None."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, nn.Parameter) else None


@dataclass(frozen=True, slots=True)
class Selection:
    """What a recipe converts, in the order of the model's modules, and what it doesn't."""

    layers: tuple[Layer, ...]
    skipped: Reasons


def scope_names(model: nn.Module, scopes: Mapping[str, str]) -> dict[str, str]:
    """Name each module path: its scope, "head" for the output embedding, else the path."""
    names = {path: scopes.get(path, path) for path, _ in model.named_modules()}
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    for path, module in model.named_modules():
        if module is head and path not in scopes:
            names[path] = "head"
    return names


def select(model: nn.Module, recipe: Recipe, names: Mapping[str, str]) -> Selection:
    """Sort every parameter that is no vector into converted and skipped."""
    owners = _owners(model)
    layers, skipped = [], []
    for path, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            place = _Place(path, names[path], module)
            spec = _decide(place, parameter, recipe, owners)
            if isinstance(spec, WeightSpec):
                layers.append(Layer(path, names[path], module, spec))
            else:
                suffix = "" if parameter_name == "weight" else f".{parameter_name}"
                skipped.append((f"{names[path]}{suffix}", spec))
    return Selection(tuple(layers), tuple(skipped))


@dataclass(frozen=True, slots=True)
class _Place:
    path: str
    name: str
    module: nn.Module

    @property
    def aliases(self) -> set[str]:
        """What a glob may match: scope and path, and the last component of each."""
        found = {text for whole in (self.name, self.path) for text in (whole, _last(whole))}
        return found | ({"router"} if _last(self.path) in _ROUTER_NAMES else set())


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Return the module paths that hold each parameter, by its address."""
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False):
            owners.setdefault(_address(parameter), []).append(path)
    return owners


def _address(parameter: nn.Parameter) -> int:
    return parameter.data_ptr() or id(parameter)


def _decide(
    place: _Place, parameter: nn.Parameter, recipe: Recipe, owners: Mapping[int, list[str]]
) -> WeightSpec | str:
    """Return how a matrix is converted, or the reason why it isn't."""
    others = [path for path in owners[_address(parameter)] if path != place.path]
    if isinstance(place.module, nn.Embedding):
        return recipe.embedding or "embeddings stay unless the recipe has a format for them"
    if reason := _why_impossible(place.module, parameter):
        return reason
    excluding = _excluded_by(place, recipe)
    if excluding is not None and not (others and recipe.embedding):
        return f"excluded by {excluding!r}"
    if others:
        return f"its weight is tied to {', '.join(others)}"
    spec = recipe.for_layer(*place.aliases)
    return "kept by a rule of the recipe" if spec is None else spec


def _why_impossible(module: nn.Module, parameter: nn.Parameter) -> str | None:
    if parameter.ndim == 3:
        return f"stacked weights of shape {list(parameter.shape)} are not supported yet"
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    if not linear or parameter.ndim != 2:
        return f"{type(module).__name__} is not a linear layer"
    if not parameter.is_floating_point():
        return f"its weight is already stored as {parameter.dtype}"
    return None


def _excluded_by(place: _Place, recipe: Recipe) -> str | None:
    matches = (g for g in recipe.exclude if any(fnmatch.fnmatchcase(c, g) for c in place.aliases))
    return next(matches, None)


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]
