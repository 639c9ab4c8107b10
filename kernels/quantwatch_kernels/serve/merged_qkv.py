"""Queries, keys and values of a self-attention in one product: one weight, one matmul, split.

`merge_qkv(model)` lays the three weights of each attention behind each other in memory. The modules
stay: paths, parameters, state dict, hooks and taps are what they were, and the parameters are views
of the one weight, so nothing is stored twice. When attention calls `q_proj`, all three results are
made at once; `k_proj` and `v_proj` hand out theirs if they are called with the very same tensor,
unchanged since, and compute their own if not. Results agree to rounding, not to the bit: a product
of another width may be summed in another order.

A model that was moved, cast or copied has its weights apart again and is merged anew at its first
call. Given up: training. Where a weight wants a gradient each module computes its own result.
"""

import copy
import threading
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantwatch_kernels.serve.replace import Replaced, Report, Skipped

__all__ = ["merge_qkv", "split_qkv"]

_ATTENTIONS = frozenset(
    f"{family}Attention"
    for family in (
        "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe", "Gemma", "Gemma2",
        "Gemma3",
    )
)  # fmt: skip
"""Self-attentions: all three projections get the same input."""
_NAMES = ("q_proj", "k_proj", "v_proj")


class _Waiting(NamedTuple):
    """Results for an input that not every module has asked for yet."""

    x: Tensor
    version: int | None
    parts: dict[int, Tensor]


class _Group:
    """The three modules of one attention, and what waits for them, by thread."""

    def __init__(self, modules: tuple[nn.Linear, nn.Linear, nn.Linear]) -> None:
        self.modules = modules
        self.waiting: dict[int, _Waiting] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Group":
        """Copy without what waits: the modules of the copy are another's."""
        made = _Group.__new__(_Group)
        memo[id(self)] = made
        made.waiting = {}
        q, k, v = (copy.deepcopy(module, memo) for module in self.modules)
        made.modules = (q, k, v)
        return made

    def result(self, place: int, x: Tensor) -> Tensor:
        """Return the product of module `place` with x."""
        version = None if x.is_inference() else x._version
        thread = threading.get_ident()
        held = self.waiting.get(thread)
        if held is None or held.x is not x or held.version != version or place not in held.parts:
            if place != 0:
                return nn.Linear.forward(self.modules[place], x)
            sizes = [module.out_features for module in self.modules]
            weight, bias = self.merged()
            parts = torch.split(nn.functional.linear(x, weight, bias), sizes, -1)
            held = _Waiting(x, version, dict(enumerate(parts)))
            self.waiting[thread] = held
        part = held.parts.pop(place)
        if not held.parts:
            del self.waiting[thread]
        return part

    def merged(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of all three, laid together first if they lie apart."""
        weights: list[Tensor] = [module.weight for module in self.modules]
        biases: list[Tensor] = [module.bias for module in self.modules]
        return _one(weights), None if biases[0] is None else _one(biases)

    @property
    def is_trained(self) -> bool:
        """Whether a gradient is wanted of a weight or a bias."""
        if not torch.is_grad_enabled():
            return False
        return any(p.requires_grad for module in self.modules for p in module.parameters())


class _MergedLinear(nn.Linear):
    """A linear module that shares one product with its siblings."""

    _group: _Group
    _place: int

    def forward(self, input: Tensor) -> Tensor:  # the base's name for it
        if self._group.is_trained:
            return super().forward(input)
        return self._group.result(self._place, input)


def merge_qkv(model: nn.Module) -> Report:
    """Merge every self-attention's projections, in place, and return what was done.

    Raises ValueError for a model that has merged ones already.
    """
    for path, module in model.named_modules():
        if isinstance(module, _MergedLinear):
            raise ValueError(f"{path} is merged already; split the model first.")
    uses = Counter(
        id(parameter)
        for _, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
    )
    report = Report()
    for path, module in model.named_modules():
        kind = type(module)
        if not all(hasattr(module, name) for name in _NAMES):
            continue
        known = next((k.__name__ for k in kind.__mro__ if k.__name__ in _ATTENTIONS), None)
        parts = [getattr(module, name) for name in _NAMES]
        reason = _why_not(parts, uses) if known else "not a self-attention of a known kind"
        if reason is not None:
            report.skipped.append(Skipped(path, kind.__name__, reason))
            continue
        _merge(parts)
        report.replaced.append(Replaced(path, kind.__name__, _MergedLinear.__name__))
    return report


def split_qkv(model: nn.Module) -> int:
    """Give every merged module its own weight back; returns how many attentions were merged."""
    merged: list[nn.Module] = [m for m in model.modules() if isinstance(m, _MergedLinear)]
    for module in merged:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.clone()
        module.__dict__.pop("_group")
        module.__dict__.pop("_place")
        module.__class__ = nn.Linear
    return len(merged) // len(_NAMES)


def _why_not(parts: list[Any], uses: Counter[int]) -> str | None:
    for name, part in zip(_NAMES, parts, strict=True):
        # Not isinstance: quantized, low-rank and parametrized ones are subclasses.
        if type(part) is not nn.Linear:
            return f"{name} is a {type(part).__name__}, not a plain linear"
        if part.weight.is_meta:
            return f"{name}'s weight is on the meta device"
    weights, biases = [part.weight for part in parts], [part.bias for part in parts]
    if len({(w.dtype, w.device, w.shape[1]) for w in weights}) > 1:
        return "its projections differ in dtype, device or input width"
    if len({bias is None for bias in biases}) > 1:
        return "only some of its projections have a bias"
    if len({uses[id(p)] for part in parts for p in part.parameters()}) > 1:
        return "a part of its weights is shared with another module"
    return None


def _merge(parts: list[nn.Linear]) -> None:
    group = _Group((parts[0], parts[1], parts[2]))
    for place, part in enumerate(parts):
        part.__class__ = _MergedLinear
        # Not attributes of nn.Module: the siblings would be listed as children.
        part.__dict__.update(_group=group, _place=place)
    group.merged()


def _one(parts: list[Tensor]) -> Tensor:
    """Return parameters [N_i, …] as one tensor [ΣN_i, …] that they are views of."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != at or not _same_storage(part, first):
            return _laid_together(parts)
        at += part.numel() * part.element_size()
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _laid_together(parts: list[Tensor]) -> Tensor:
    with torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = view
    return whole
