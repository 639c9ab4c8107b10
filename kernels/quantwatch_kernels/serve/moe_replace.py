"""Quantized experts in a transformers model: its stacks of experts run through `moe_gemm`.

Experts that lie in `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I] with silu between them are
taken out of the model and stay as codes only; router, shared experts and all else are as they were.
Formats: int8 per output; int4 asymmetric in groups of 32 inputs; int4-a4 symmetric in groups of 32,
with the rows that meet them rounded to 4 bits in groups of 32, too (W4A4).

Each module is tried first: given the values that its codes stand for, its own forward must agree
with ours on random tokens, all sent to one expert among them. So a clamp, a bias or interleaved
gates (gpt-oss) are found, and refused. An id beyond the experts is a token that a model dropped: it
adds nothing here, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT4
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerGroup, Recipe
from quantwatch_kernels.quantize.stacks import stored_in_out
from quantwatch_kernels.serve.moe_experts import ExpertStack
from quantwatch_kernels.serve.moe_gemm import moe_mlp

__all__ = ["EXPERT_FORMATS", "ServedExperts", "Taken", "serve_experts_"]

EXPERT_FORMATS: dict[str, tuple[str, ActivationSpec | None]] = {
    "int8": ("int8-channel", None),
    "int4": ("uint4-g32", None),
    "int4-a4": ("int4-g32", ActivationSpec(INT4, PerGroup(32))),
}
"""Name → recipe of the weights, rounding of the rows."""
_SILU = frozenset({"SiLU", "SiLUActivation"})
_ROUNDINGS = 64
"""Allowed difference in units of the last place of the largest output."""


class Taken(NamedTuple):
    """One module that was replaced: its bytes before and after."""

    path: str
    before: int
    after: int


class ServedExperts(nn.Module):
    """Experts that are codes: takes what transformers' experts take."""

    def __init__(self, gate_up: ExpertStack, down: ExpertStack) -> None:
        """Keep two stacks, gate's outputs before up's."""
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.num_experts = gate_up.shape[0]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, H] of tokens [T, H], ids [T, k] and weights [T, k]."""
        ids = top_k_index.masked_fill(top_k_index >= self.num_experts, -1)
        return moe_mlp(hidden_states, (ids, top_k_weights), self.gate_up, self.down)


def serve_experts_(model: nn.Module, name: str) -> list[Taken]:
    """Replace every stack of experts in place; returns what was, in the order of the modules.

    Raises ValueError for a name that isn't known, a model without experts, and experts that compute
    something else than act(gate) · up and down.
    """
    if name not in EXPERT_FORMATS:
        raise ValueError(f"{name!r} is no format of experts; known: {', '.join(EXPERT_FORMATS)}.")
    found = [
        (path, module)
        for path, module in model.named_modules()
        if "experts" in path.rpartition(".")[2] and _stacks(module) is not None
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no stacked experts with gate, up and down.")
    return [_take(model, path, module, name) for path, module in found]


def _stacks(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if up is None or down is None or up.ndim != 3 or down.ndim != 3:
        return None
    return up.detach(), down.detach()


def _take(model: nn.Module, path: str, module: nn.Module, name: str) -> Taken:
    stacks = _stacks(module)
    assert stacks is not None
    kind, activation = type(module).__name__, type(getattr(module, "act_fn", None)).__name__
    if activation not in _SILU or stored_in_out(module, "gate_up_proj"):
        raise ValueError(f"{path}: {kind} is no stack [E, 2I, H] with silu: it has {activation}.")
    recipe, activations = EXPERT_FORMATS[name]
    spec = Recipe.named(recipe).weights
    served = ServedExperts(*(ExpertStack(stack, spec, activations) for stack in stacks))
    before = sum(stack.numel() * stack.element_size() for stack in stacks)
    _try(path, module, served)
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, served)
    return Taken(path, before, served.gate_up.num_bytes + served.down.num_bytes)


def _try(path: str, module: nn.Module, served: ServedExperts) -> None:
    """Hold both forwards against each other on the values of the codes, unrounded rows."""
    rounding = served.gate_up.activations
    for stack in (served.gate_up, served.down):
        stack.activations = None
    with _holding(module, gate_up_proj=served.gate_up, down_proj=served.down), torch.no_grad():
        for args in _probes(module, served):
            expected, found = _plain(module, args), served(*args)
            allowed = _ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
            if not bool(((found - expected).abs() <= allowed).all()):
                raise ValueError(f"{path}: {type(module).__name__} computes something else.")
    for stack in (served.gate_up, served.down):
        stack.activations = rounding


@contextmanager
def _holding(module: nn.Module, **stacks: ExpertStack) -> Iterator[None]:
    """Inside, a module's parameters are what codes say; afterwards they are its own again."""
    parameters = [module.get_parameter(name) for name in stacks]
    kept = [parameter.data for parameter in parameters]
    try:
        for parameter, stack in zip(parameters, stacks.values(), strict=True):
            values = [stack.expert(e).values for e in range(stack.shape[0])]
            parameter.data = torch.stack(values).to(parameter)
        yield
    finally:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data = data


def _plain(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    """Run the module's own loop over experts, whatever implementation the model has chosen."""
    config: Any = getattr(module, "config", None)
    kept = getattr(config, "_experts_implementation", None)
    try:
        if kept is not None:
            config._experts_implementation = "eager"
        output: Tensor = module(*args)
        return output
    finally:
        if kept is not None:
            config._experts_implementation = kept


def _probes(module: nn.Module, served: ServedExperts) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return tokens, ids and weights: spread over the experts, and all of them to the last one."""
    like = module.get_parameter("gate_up_proj")
    generator = torch.Generator().manual_seed(0)
    tokens, top_k = 5, min(2, served.num_experts)
    x = torch.randn(tokens, like.shape[2], generator=generator).to(like)
    weights = torch.rand(tokens, top_k, generator=generator).to(like)
    spread = torch.arange(tokens * top_k).view(tokens, top_k) % served.num_experts
    last = torch.full((tokens, 1), served.num_experts - 1)
    return [(x, ids.to(like.device), weights[:, : ids.shape[1]]) for ids in (spread, last)]
