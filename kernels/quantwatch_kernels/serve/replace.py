"""Fused operators put into a transformers model: norms, gated MLPs, and the add before a norm.

A module keeps its class as a base, its parameters, its children, its hooks and its place; only its
`forward` is another. `isinstance` and state dicts stay as they are, and `restore` takes it back.

- RMSNorm: its own forward also takes `residual`, then it returns (normalized, sum).
- gated MLP: act(gate) · up in one operator; hooks of its `act_fn` don't fire any more.
- decoder layer: the sum after attention goes into the norm that follows it.

What is known is a table of classes, because a look at children can't tell a clamp or a scale in a
forward. Norms and MLPs of the table are tried on a random input beside the original all the same:
a later transformers may have changed them. What isn't replaced is reported with its reason.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantwatch_kernels.serve.fused_act import Activation, act_mul
from quantwatch_kernels.serve.fused_norm import Casting, Norm, add_rms_norm

__all__ = ["Replaced", "Report", "Skipped", "replace", "restore"]

_NORMS: dict[str, Casting] = {
    **dict.fromkeys(
        (
            "LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm",
            "Qwen2MoeRMSNorm", "Qwen3MoeRMSNorm",
        ),
        "llama",
    ),
    **dict.fromkeys(("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"), "gemma"),
}  # fmt: skip
_MLPS = frozenset(
    f"{family}MLP"
    for family in (
        "Llama", "Mistral", "Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3",
    )
)  # fmt: skip
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}  # fmt: skip
_LAYERS = frozenset(
    f"{family}DecoderLayer"
    for family in (
        "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe", "Gemma",
    )
)  # fmt: skip
_SANDWICHES = frozenset({"Gemma2DecoderLayer", "Gemma3DecoderLayer"})
"""Norms around attention and MLP, on both sides."""
_GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")


class Replaced(NamedTuple):
    """A module whose forward is another now."""

    path: str
    kind: str
    by: str


class Skipped(NamedTuple):
    """A module that might have been replaced, and why it wasn't."""

    path: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What was replaced, what wasn't and why; in the order of the modules."""

    replaced: list[Replaced] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


class _Fused:
    """Marks a class that `replace` made."""

    _fused_norm: Norm
    _fused_activation: Activation


class _NormForward(_Fused):
    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        normalized, summed = add_rms_norm(x, residual, self.weight, self._fused_norm)
        return normalized if residual is None else (normalized, summed)


class _MLPForward(_Fused):
    def forward(self: Any, x: Tensor) -> Any:
        inner = act_mul(self.gate_proj(x), self.up_proj(x), self._fused_activation)
        return self.down_proj(inner)


class _LayerForward(_Fused):
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        normalized = self.input_layernorm(hidden_states)
        attended = self.self_attn(normalized, **_named(self, args), **kwargs)[0]
        normalized, summed = self.post_attention_layernorm(attended, residual=hidden_states)
        return summed + self.mlp(normalized)


class _SandwichForward(_Fused):
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        normalized = self.input_layernorm(hidden_states)
        attended = self.self_attn(normalized, **_named(self, args), **kwargs)[0]
        attended = self.post_attention_layernorm(attended)
        normalized, summed = self.pre_feedforward_layernorm(attended, residual=hidden_states)
        return summed + self.post_feedforward_layernorm(self.mlp(normalized))


def _named(layer: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Name a layer's positional arguments: its attention takes the same ones in another order."""
    names = list(inspect.signature(_original(layer).forward).parameters)[2:]
    return dict(zip(names, args, strict=False))


def _is_fused(module: nn.Module) -> bool:
    return isinstance(module, _Fused)


def _original(module: nn.Module) -> type[nn.Module]:
    """Return the class that a fused module had."""
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, _Fused))
    assert issubclass(kind, nn.Module)
    return kind


def replace(model: nn.Module) -> Report:
    """Put the fused operators into a model, in place, and return what was done.

    Raises ValueError for a model that has fused operators already.
    """
    if done := [path for path, module in model.named_modules() if _is_fused(module)]:
        raise ValueError(f"{done[0]} is fused already; restore the model first.")
    report = Report()
    # Layers last: they need their norms to be fused.
    for look in (_norm, _mlp, _layer):
        for path, module in list(model.named_modules()):
            kind = type(module).__name__
            found = look(module)
            if isinstance(found, type):
                report.replaced.append(Replaced(path, kind, found.__name__))
            elif found is not None:
                report.skipped.append(Skipped(path, kind, found))
    return report


def restore(model: nn.Module) -> int:
    """Give every module its own forward back; returns how many had another one."""
    fused: list[nn.Module] = [module for module in model.modules() if _is_fused(module)]
    for module in fused:
        module.__class__ = _original(module)
        for name in ("_fused_norm", "_fused_activation"):
            module.__dict__.pop(name, None)
    return len(fused)


def _put(module: nn.Module, forward: type) -> type:
    original = type(module)
    made = type(f"Fused{original.__name__}", (forward, original), {"__module__": __name__})
    module.__class__ = made
    return made


def _norm(module: nn.Module) -> type | str | None:
    kind = type(module).__name__
    if not kind.endswith("Norm"):
        return None
    if kind not in _NORMS:
        return "not a norm of the Llama, Qwen or Gemma kind"
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None:
        return "it has no epsilon"
    return _tried(module, _NormForward, "_fused_norm", Norm(eps, _NORMS[kind]))


def _mlp(module: nn.Module) -> type | str | None:
    kind = type(module).__name__
    if not all(hasattr(module, name) for name in _GATED):
        return "not a gated MLP of two projections" if kind.endswith("MLP") else None
    if kind not in _MLPS:
        return "not an MLP of the Llama, Qwen or Gemma kind"
    activation = _ACTIVATIONS.get(type(module.act_fn).__name__)
    if activation is None:
        return f"its activation is {type(module.act_fn).__name__}"
    return _tried(module, _MLPForward, "_fused_activation", activation)


def _layer(module: nn.Module) -> type | str | None:
    kind = type(module).__name__
    if not kind.endswith("DecoderLayer"):
        return None
    if kind not in _LAYERS | _SANDWICHES:
        return "not a decoder layer of the Llama, Qwen or Gemma kind"
    sandwich = kind in _SANDWICHES
    norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    if not isinstance(getattr(module, norm, None), _NormForward):
        return f"{norm} wasn't replaced"
    return _put(module, _SandwichForward if sandwich else _LayerForward)


def _tried(module: nn.Module, forward: type, name: str, value: Any) -> type | str:
    """Replace a forward if it gives what the original gives, up to a few roundings."""
    with torch.no_grad(), _without_hooks(module):
        before = [module(x) for x in _probes(module)]
        setattr(module, name, value)
        made = _put(module, forward)
        after = [module(x) for x in _probes(module)]
    for found, expected in zip(after, before, strict=True):
        # Sums of a down projection: relative to the largest, not to each.
        allowed = 16 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
        if found.dtype != expected.dtype or not bool(((found - expected).abs() <= allowed).all()):
            restore(module)
            return "this version of it computes something else"
    return made


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Inside, no hook sees what is only a trial: taps count calls, observers remember values."""
    kept = [(m, m._forward_hooks, m._forward_pre_hooks) for m in module.modules()]
    try:
        for inner, after, before in kept:
            inner._forward_hooks, inner._forward_pre_hooks = type(after)(), type(before)()
        yield
    finally:
        for inner, after, before in kept:
            inner._forward_hooks, inner._forward_pre_hooks = after, before


def _probes(module: Any) -> Iterator[Tensor]:
    """Yield inputs of usual and of large size, the same each time."""
    linear = getattr(module, "gate_proj", None)
    weight = module.weight if linear is None else next(linear.parameters(), None)
    width = linear.in_features if linear is not None else len(module.weight)
    like = weight if weight is not None and weight.is_floating_point() else torch.empty(0)
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 30.0):
        yield (size * torch.randn(2, width, generator=generator)).to(like.device, like.dtype)
