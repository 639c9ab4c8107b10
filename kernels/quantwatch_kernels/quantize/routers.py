"""What routes tokens to experts: found by the names that decoders share and by what stands beside.

A matrix routes if a component of its path is a router's name: the router itself (Mixtral's
`mlp.gate`) or one inside it (`mlp.gate.wg` of HunYuan, `self_attention.experts.router.layer` of
JetMoe). A gate that weighs the shared expert routes too, but chooses nothing.
"""

from collections.abc import Iterator

from torch import nn

__all__ = ["ROUTING_NAMES", "SHARED_GATE", "choosing_matrices", "routing_name", "unrouted_experts"]

_ROUTERS = frozenset({"gate", "router", "router_gate", "gate_network"})
SHARED_GATE = "shared_expert_gate"
ROUTING_NAMES = _ROUTERS | {SHARED_GATE}


def routing_name(path: str) -> str:
    """Return the component of a path that routes, '' where none does."""
    return next((part for part in path.split(".") if part in ROUTING_NAMES), "")


def choosing_matrices(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each router beside experts and the paths of its modules with a `weight` matrix."""
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if name not in _ROUTERS or routing_name(parent):
            continue
        beside = model.get_submodule(parent).named_children()
        if any(_holds_experts(*child) for child in beside if child[1] is not module):
            yield path, _matrices(path, module)


def unrouted_experts(model: nn.Module) -> list[str]:
    """Return the paths of experts of whose router nothing is known: it may have been quantized."""
    found = []
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if not path or "shared" in name or "experts" in parent or not _holds_experts(name, module):
            continue
        if not any(map(routing_name, _matrices("", model.get_submodule(parent)))):
            found.append(path)
    return found


def _matrices(path: str, module: nn.Module) -> list[str]:
    return [
        place
        for place, inner in module.named_modules(prefix=path)
        if (weight := inner._parameters.get("weight")) is not None and weight.ndim == 2
    ]


def _holds_experts(name: str, module: nn.Module) -> bool:
    stacked = any(weight.ndim == 3 for weight in module.parameters(recurse=False))
    return "experts" in name or (stacked and hasattr(module, "num_experts"))
