"""What routes tokens to experts: found by the names that decoders share and by what stands beside.

A module routes if its name is a router's and says nothing else (`router`, `router_gate`, the
`shared_expert_gate` that weighs the shared expert but chooses nothing), or if it is a `gate` beside
experts: the gate of a gated MLP is no router, nor is that of one expert in a list. Beside experts
without any such name, a matrix with one row per expert routes, whatever it is called. All that lies
inside routes, too (`gate.wg` of HunYuan, `router.layer` of JetMoe, the MLP in Zaya's `gate`).
"""

import re
from collections.abc import Iterator, Mapping

from torch import nn

from quantwatch_kernels.quantize.stacks import holds_experts

__all__ = ["ROUTING_NAMES", "SHARED_GATE", "choosing_matrices", "routing_paths", "unrouted_experts"]

_GATES = frozenset({"gate", "wg", "gating"})
_ROUTERS = frozenset({"router", "router_gate", "gate_network"})
SHARED_GATE = "shared_expert_gate"
ROUTING_NAMES = _ROUTERS | {"gate", SHARED_GATE}
"""Names that a matrix which routes may have itself."""
_EXPERT = re.compile(r"(^|\.)\w*experts\.\d+(\.|$)")
_ROUTING_CLASS = re.compile(r"Router|Gating$|MoE\w*Gate$|TopK")


def routing_paths(model: nn.Module, prefix: str = "") -> Mapping[str, str]:
    """Return the path of every module that routes or lies in one that does → that one's name.

    Paths begin with `prefix`.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules(prefix=prefix):
        children = dict(module.named_children())
        for name in _routing_children(path, children):
            root = f"{path}.{name}" if path else name
            for place, _ in children[name].named_modules(prefix=root):
                found.setdefault(place, name)
    return found


def choosing_matrices(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each router beside experts and the paths of its modules with a `weight` matrix."""
    routing = routing_paths(model)
    for path, name in routing.items():
        parent = path.rpartition(".")[0]
        if name == SHARED_GATE or parent in routing:
            continue
        module = model.get_submodule(path)
        beside = model.get_submodule(parent).named_children()
        if any(holds_experts(*child) for child in beside if child[1] is not module):
            yield path, _matrices(path, module)


def unrouted_experts(model: nn.Module) -> list[str]:
    """Return the paths of experts of whose router nothing is known: it may have been quantized."""
    found = []
    routing = routing_paths(model)
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if not path or "shared" in name or "experts" in parent or not holds_experts(name, module):
            continue
        beside = model.get_submodule(parent)
        if not any(place in routing for place in _matrices(parent, beside)):
            found.append(path)
    return found


def _routing_children(path: str, children: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the direct children that route."""
    if _EXPERT.search(path):
        return []  # inside one expert of a list
    experts = [c for n, c in children.items() if "shared" not in n and holds_experts(n, c)]
    named = [name for name in children if name in _ROUTERS or name == SHARED_GATE]
    named += [
        name
        for name in sorted(children.keys() & _GATES)
        if experts or _ROUTING_CLASS.search(type(children[name]).__name__)
    ]
    if any(name != SHARED_GATE for name in named) or not experts:
        return named
    counts = {count for each in experts if (count := _count(each))}
    alone = [n for n, c in children.items() if n not in named and _rows(c) in counts]
    return named + alone


def _count(experts: nn.Module) -> int:
    """Return the number of experts in a list or a stack; 0 if it can't be told."""
    if isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return len(experts)
    stacked = [len(weight) for weight in experts.parameters(recurse=False) if weight.ndim == 3]
    return stacked[0] if stacked else 0


def _rows(module: nn.Module) -> int:
    weight = module._parameters.get("weight")
    return len(weight) if weight is not None and weight.ndim == 2 else -1


def _matrices(path: str, module: nn.Module) -> list[str]:
    return [
        place
        for place, inner in module.named_modules(prefix=path)
        if (weight := inner._parameters.get("weight")) is not None and weight.ndim == 2
    ]
