"""Which matrices of a model a recipe converts, and why every other one stays."""

import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from quantwatch_kernels.quantize.recipe import Recipe, WeightSpec
from quantwatch_kernels.quantize.routers import routing_paths
from quantwatch_kernels.quantize.stacks import is_stack, num_experts, stack, stored_in_out
from quantwatch_kernels.quantize.unmatched import refuse_unmatched

__all__ = ["Layer", "Reasons", "Selection", "scope_names", "scoped", "select"]

Reasons = tuple[tuple[str, str], ...]
"""(scope or path, reason) pairs."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A matrix to convert: where it is, what it is called, how; its weight as [out, in].

    Of stacked experts [E, out, in] each is a matrix of its own, with the number `expert`.
    """

    path: str
    name: str
    module: nn.Module
    spec: WeightSpec
    parameter: str = "weight"
    expert: int | None = None

    @property
    def key(self) -> str:
        """Where it is, unlike any other: the path, for an expert its number and parameter too."""
        return self.path if self.expert is None else f"{self.path}.{self.expert}.{self.parameter}"

    @property
    def transposed(self) -> bool:
        """Whether the module stores its weight as [in, out]."""
        if self.expert is None:
            return type(self.module).__name__ == "Conv1D"
        return stored_in_out(self.module, self.parameter)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], sharing memory with the module's."""
        if self.expert is not None:
            weight = stack(self.module, self.parameter)[self.expert]
        else:
            weight = self.module.get_parameter(self.parameter).detach()
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


def scoped(path: str, names: Mapping[str, str]) -> str:
    """Name a path inside a named module after it: layers.0.mlp + .experts."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        place = ".".join(parts[:count])
        if names.get(place, place) != place:
            return ".".join([names[place], *parts[count:]])
    return path


def select(model: nn.Module, recipe: Recipe, names: Mapping[str, str]) -> Selection:
    """Sort every parameter that is no vector into converted and skipped.

    Raises ValueError for a rule or an exclusion of the recipe that matches nothing.
    """
    places_of = partial(_places, names=names, routing=routing_paths(model))
    _refuse_unmatched(model, recipe, places_of)
    owners = _owners(model)
    find_table = getattr(model, "get_input_embeddings", None)
    table = find_table() if callable(find_table) else None
    layers: list[Layer] = []
    skipped: list[tuple[str, str]] = []
    for path, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            reasons = []
            places = list(places_of(path, module, parameter_name))
            for place in places:
                spec = _decide(place, parameter, recipe, owners, module is table)
                if isinstance(spec, WeightSpec):
                    layer = Layer(path, place.name, module, spec, parameter_name, place.expert)
                    layers.append(layer)
                else:
                    reasons.append((place.name, spec))
            skipped += _together(reasons, f"{names[path]}.{parameter_name}", len(places))
    return Selection(tuple(layers), tuple(skipped))


def _refuse_unmatched(
    model: nn.Module, recipe: Recipe, places_of: Callable[..., Iterator["_Place"]]
) -> None:
    ruled: list[set[str]] = []
    others: list[set[str]] = []
    for path, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            free = parameter.ndim >= 2 and not isinstance(module, nn.Embedding)
            places = places_of(path, module, parameter_name)
            (ruled if free else others).extend(place.aliases for place in places)
    refuse_unmatched(recipe, ruled, others)


def _places(
    path: str,
    module: nn.Module,
    parameter: str,
    names: Mapping[str, str],
    routing: Collection[str],
) -> Iterator["_Place"]:
    """Yield where a parameter is; each expert of a stack is a place of its own."""
    if not is_stack(path, module, parameter):
        suffix = "" if parameter == "weight" else f".{parameter}"
        routes = path in routing
        yield _Place(f"{path}{suffix}", f"{names[path]}{suffix}", module, routes)
        return
    for expert in range(num_experts(module, parameter)):
        suffix = f".{expert}.{parameter}"
        whole = scoped(path, names)
        name, stacked = f"{whole}{suffix}", f"{whole}.{parameter}"
        yield _Place(f"{path}{suffix}", name, module, False, expert, stacked)


def _together(reasons: list[tuple[str, str]], stack: str, count: int) -> list[tuple[str, str]]:
    """Report a stack of which nothing is converted, for one reason, in one line."""
    same = len(reasons) == count > 1 and len({reason for _, reason in reasons}) == 1
    return [(stack, reasons[0][1])] if same else reasons


@dataclass(frozen=True, slots=True)
class _Place:
    path: str
    name: str
    module: nn.Module
    routes: bool = False
    expert: int | None = None
    stack: str = ""

    @property
    def aliases(self) -> set[str]:
        """What a glob may match: scope and path, and the last component of each.

        Of an expert its stack's name as well: layers.0.mlp.experts.down_proj.
        """
        found = {text for whole in (self.name, self.path) for text in (whole, _last(whole))}
        found |= {self.stack} if self.stack else set()
        return found | ({"router"} if self.routes else set())


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
    place: _Place,
    parameter: nn.Parameter,
    recipe: Recipe,
    owners: Mapping[int, list[str]],
    looks_up_tokens: bool,
) -> WeightSpec | str:
    """Return how a matrix is converted, or the reason why it isn't."""
    holders = owners[_address(parameter)]
    others = [path for path in holders if path != place.path] if len(holders) > 1 else []
    if isinstance(place.module, nn.Embedding):
        if not looks_up_tokens:
            return "only the embedding of tokens is ever quantized"
        return recipe.embedding or "embeddings stay unless the recipe has a format for them"
    if reason := _why_impossible(place, parameter):
        return reason
    excluding = _excluded_by(place, recipe)
    if excluding is not None and not (others and recipe.embedding):
        return f"excluded by {excluding!r}"
    if others:
        return f"its weight is tied to {', '.join(others)}"
    spec = recipe.for_layer(*place.aliases)
    return "kept by a rule of the recipe" if spec is None else spec


def _why_impossible(place: _Place, parameter: nn.Parameter) -> str | None:
    if parameter.ndim == 3 and place.expert is None:
        return f"stacked weights of shape {list(parameter.shape)} aren't known to be experts"
    linear = isinstance(place.module, nn.Linear) or type(place.module).__name__ == "Conv1D"
    if parameter.ndim > 3 or (place.expert is None and not linear):
        return f"{type(place.module).__name__} is not a linear layer"
    if not parameter.is_floating_point():
        return f"its weight is already stored as {parameter.dtype}"
    return None


def _excluded_by(place: _Place, recipe: Recipe) -> str | None:
    matches = (g for g in recipe.exclude if any(fnmatch.fnmatchcase(c, g) for c in place.aliases))
    return next(matches, None)


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]
