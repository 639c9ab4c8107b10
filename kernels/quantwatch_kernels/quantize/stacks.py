"""Experts that lie in one parameter: where each begins, and which of its axes is the input's.

Stacks are [E, out, in] (Mixtral), [E, in, out] (gpt-oss, Llama 4, Aria), or flat, [E·F, H] with the
same H for all three matrices (DBRX: w1 and v1 are [out, in] per expert, w2 is [in, out]).
transformers says `is_transposed` where its own grouped product multiplies the experts; where it
doesn't (Llama 4, modules of one's own) the shapes of a fused pair tell: gate and up read what down
writes. Given up: a stack whose module neither says so nor holds such a pair is [E, out, in].
"""

from torch import Tensor, nn

__all__ = ["holds_experts", "is_stack", "lies_flat", "num_experts", "stack", "stored_in_out"]

_UP, _DOWN = "gate_up_proj", "down_proj"
_FLAT = frozenset({"w1", "v1", "w2"})


def is_stack(path: str, module: nn.Module, parameter: str) -> bool:
    """Say whether a parameter of the module at `path` holds several experts' matrices."""
    value = module.get_parameter(parameter)
    if value.ndim == 2:
        return lies_flat(module) and parameter in _FLAT
    return value.ndim == 3 and holds_experts(path.rpartition(".")[2], module)


def holds_experts(name: str, module: nn.Module) -> bool:
    """Say whether a module, known by its last name, is a list or a stack of experts."""
    stacked = any(weight.ndim == 3 for weight in module.parameters(recurse=False))
    return "experts" in name or (stacked and hasattr(module, "num_experts"))


def lies_flat(module: nn.Module) -> bool:
    """Say whether a module's experts lie one below the other in matrices [E·F, H]."""
    return bool(_flat_experts(module))


def num_experts(module: nn.Module, parameter: str) -> int:
    """Return how many experts a stack holds."""
    value = module.get_parameter(parameter)
    return len(value) if value.ndim == 3 else _flat_experts(module)


def stack(module: nn.Module, parameter: str) -> Tensor:
    """Return a stack [E, .., ..] as it is stored, sharing memory with the parameter."""
    value = module.get_parameter(parameter).detach()
    return value if value.ndim == 3 else value.view(_flat_experts(module), -1, value.shape[1])


def stored_in_out(module: nn.Module, parameter: str) -> bool:
    """Say whether the experts of a stack are stored [in, out] instead of [out, in]."""
    if module.get_parameter(parameter).ndim == 2:
        return parameter == "w2"
    said = getattr(module, "is_transposed", None)
    if said is not None:
        return bool(said)
    up, down = (module._parameters.get(name) for name in (_UP, _DOWN))
    if up is None or down is None or up.ndim != 3 or down.ndim != 3:
        return False
    return up.shape[2] != down.shape[1] and up.shape[1] == down.shape[2]


def _flat_experts(module: nn.Module) -> int:
    """Return the number of experts in DBRX's flat stacks, 0 for another module."""
    count, width = (getattr(module, name, 0) for name in ("moe_num_experts", "ffn_hidden_size"))
    found = module._parameters
    flat = found.keys() >= _FLAT and all(
        (value := found[name]) is not None and value.ndim == 2 and len(value) == count * width
        for name in _FLAT
    )
    return int(count) if flat and count else 0
