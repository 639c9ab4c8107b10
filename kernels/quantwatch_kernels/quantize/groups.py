"""Which matrices of a decoder are quantized together when their sensitivity is asked for.

    layer         every matrix of one decoder layer but those that route
    attention, mlp                its halves (routing left out)
    linear        one linear layer
    experts, expert               all routed experts of a layer; one of them (gate, up and down)
    shared expert                 the expert that every token passes through
    router, shared gate           what chooses and weighs experts
    embedding, head               outside the layers; a tied head is the embedding

Found by structure and by the names that decoders share; a matrix whose half can't be told belongs
to its layer and is a linear layer of its own.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from quantwatch_kernels.quantize.decoder_layers import find_decoder_layers
from quantwatch_kernels.quantize.experts import expert_layers
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.routers import SHARED_GATE, routing_paths
from quantwatch_kernels.quantize.selection import Layer, scope_names, scoped
from quantwatch_kernels.quantize.stacks import is_stack

__all__ = ["KINDS", "Group", "Kind", "find_groups"]

Kind = Literal[
    "layer", "attention", "mlp", "linear", "experts", "expert", "shared expert", "router",
    "shared gate", "embedding", "head",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

_ATTENTION = re.compile(r"attn|attention")
_MLP = re.compile(r"mlp|feed_forward|moe|ffn")
_EXPERT = re.compile(r"experts\.(\d+)\.")
# A layer carries a spec; a group's parts get theirs when they are quantized.
_ANY = Recipe.named("int8-channel").weights


@dataclass(frozen=True, slots=True)
class Group:
    """Matrices that are quantized together while everything else stays as it is."""

    name: str
    kind: Kind
    layer: int | None
    """Number of its decoder layer; None for embedding and head."""
    path: str
    """The module whose output is theirs: of a single expert in a stack, the stack's."""
    parts: tuple[Layer, ...]

    @property
    def num_weights(self) -> int:
        """Weights of all parts."""
        return sum(part.weight.numel() for part in self.parts)


def find_groups(model: nn.Module, scopes: Mapping[str, str] | None = None) -> list[Group]:
    """Return every group of a model in the order of its layers; `scopes` names module paths.

    Raises ValueError where the decoder layers can't be found.
    """
    names = scope_names(model, scopes or {})
    groups = [_outside(model, names, "embedding")]
    routing = routing_paths(model)
    for number, (path, layer) in enumerate(find_decoder_layers(model)):
        parts = list(_parts(path, layer, names))
        groups += [g for g in _in_layer(number, path, parts, names, routing) if g.parts]
    groups.append(_outside(model, names, "head"))
    return [group for group in groups if group is not None]


def _outside(
    model: nn.Module, names: Mapping[str, str], kind: Literal["embedding", "head"]
) -> Group | None:
    table = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = table if kind == "embedding" else head
    tied = head is not None and head.weight is table.weight
    if found is None or (kind == "head" and tied):
        return None
    path = next(path for path, module in model.named_modules() if module is found)
    return Group(names[path], kind, None, path, (Layer(path, names[path], found, _ANY),))


def _parts(path: str, layer: nn.Module, names: Mapping[str, str]) -> Iterator[Layer]:
    for place, module in layer.named_modules(prefix=path):
        for parameter, value in module.named_parameters(recurse=False):
            if not value.is_floating_point():
                continue
            whole = Layer(place, scoped(place, names), module, _ANY, parameter)
            if is_stack(place, module, parameter):
                yield from expert_layers(whole)
            elif value.ndim == 2 and parameter == "weight":
                yield whole


def _in_layer(
    number: int,
    path: str,
    parts: list[Layer],
    names: Mapping[str, str],
    routing: Mapping[str, str],
) -> Iterator[Group]:
    def group(kind: Kind, where: str, members: list[Layer], name: str = "") -> Group:
        return Group(name or scoped(where, names), kind, number, where, tuple(members))

    gates = [part for part in parts if part.path in routing]
    plain = [part for part in parts if part.path not in routing]
    yield group("layer", path, plain)
    for kind, pattern in (("attention", _ATTENTION), ("mlp", _MLP)):
        members = [part for part in plain if pattern.search(_child(path, part))]
        where = ".".join([path, _child(path, members[0])]) if members else path
        yield group(kind, where, members)  # type: ignore[arg-type]
    routed = [part for part in plain if _number(part) is not None]
    where = routed[0].path.partition("experts")[0] + "experts" if routed else path
    yield group("experts", where, routed)
    for expert in sorted({_number(part) or 0 for part in routed}):
        members = [part for part in routed if _number(part) == expert]
        stacked = members[0].expert is not None
        name = f"{scoped(where, names)}.{expert}"
        yield group("expert", where if stacked else f"{where}.{expert}", members, name)
    shared = [part for part in plain if "shared_expert" in part.path]
    yield group("shared expert", shared[0].path.rpartition(".")[0] if shared else path, shared)
    for part in gates:
        shared_gate = routing[part.path] == SHARED_GATE
        yield group("shared gate" if shared_gate else "router", part.path, [part])
    for part in plain:
        if _number(part) is None:
            yield group("linear", part.path, [part])


def _child(path: str, part: Layer) -> str:
    return part.path[len(path) + 1 :].partition(".")[0]


def _number(part: Layer) -> int | None:
    """Return which routed expert a matrix belongs to, stacked or in a list."""
    if part.expert is not None:
        return part.expert
    found = _EXPERT.search(f"{part.path}.")
    return None if found is None else int(found[1])
