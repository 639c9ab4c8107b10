"""Plant a fault of known size in a model for a while; what was there before is never written to.

Where a weight lies, another tensor takes its place, and at the end the old one is put back as the
object it was: bit for bit, whatever is raised in between, and for weights that others share too. It
costs the memory of the planted weights. Given up against writing in place: modules whose weights
are computed from others (parametrizations), held outside of memory (streamed), or packed by another
library; they are refused in words.
"""

import copy
import hashlib
import random
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch.config.canary import CanaryConfig
from quantwatch.config.scopes import matches
from quantwatch.domain import Scope, is_layer
from quantwatch.errors import ModelError
from quantwatch.models.anatomy import Anatomy
from quantwatch_kernels.quantize.packed_linear import PackedLinear

Slots = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plant:
    """A fault at one place: weights become `1 + size` times as large."""

    fault: str
    size: float
    place: Scope
    draw: int
    """Any number ≥ 0: which channel it is, modulo their number."""


def places(anatomy: Anatomy, config: CanaryConfig) -> list[Scope]:
    """Return where a fault may be planted, in the order of the model.

    A glob means what lies inside of its scopes, too. Raises ModelError when nothing is left.
    """
    found = [
        scope for scope in _candidates(anatomy, config.fault) if _is_wanted(config.scope, scope)
    ]
    if not found:
        what = "decoder layer" if config.fault == "layer" else "linear layer"
        raise ModelError(f"canary: no {what} of this model is in scope = {config.scope!r}")
    return found


def next_place(found: list[Scope], check: str, turn: int) -> Scope:
    """Return the place whose turn it is: every one once, in an order drawn anew for each round."""
    rounds, number = divmod(turn, len(found))
    order = list(found)
    random.Random(_number(f"canary:{check}:{rounds}")).shuffle(order)
    return order[number]


def plant_of(config: CanaryConfig, found: list[Scope], check: str, slot: tuple[int, str]) -> Plant:
    """Return the fault of a slot, given by its turn and its name."""
    turn, name = slot
    draw = _number(f"canary:{check}:{name}")
    return Plant(config.fault, config.size, next_place(found, check, turn), draw)


@contextmanager
def planted(module: nn.Module, anatomy: Anatomy, plant: Plant) -> Iterator[int | None]:
    """Plant a fault until the body ends; yield the output channel, None when it is all of them.

    Raises ModelError naming the place, with nothing changed: it holds no weight that can be
    changed, or the change is lost in the rounding of its dtype.
    """
    inside = [
        scope
        for scope in anatomy.linears
        if scope == plant.place
        or (scope.startswith(f"{plant.place}.") and scope not in anatomy.routers)
    ]
    if not inside:
        raise ModelError(f"canary: {plant.place} has no linear layer of its own")
    channel: int | None = None
    with ExitStack() as undo:
        for scope in inside:
            part = module.get_submodule(anatomy.linears[scope])
            channel = _swap(part, scope, plant, undo)
        yield channel if plant.fault == "channel" else None


def twin(module: nn.Module) -> nn.Module:
    """Return modules of their own around the same tensors: a plant in one is not in the other."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _candidates(anatomy: Anatomy, fault: str) -> list[Scope]:
    if fault == "layer":
        return [scope for scope in anatomy.taps if is_layer(scope)]
    # A router's logits choose experts: what a small change does there is no matter of size. An
    # expert may see no token at all.
    left_out = anatomy.routers | anatomy.routed
    return [scope for scope in anatomy.linears if scope not in left_out]


def _is_wanted(globs: str | tuple[str, ...], scope: str) -> bool:
    parts = scope.split(".")
    around = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return any(matches(globs, each) for each in around)


def _swap(part: nn.Module, scope: str, plant: Plant, undo: ExitStack) -> int:
    """Put planted tensors in the place of a module's own; `undo` puts these back."""
    if isinstance(part, PackedLinear):
        # A value is (code − zero) · scale. Layouts made before would go on being multiplied.
        undo.callback(setattr, part, "_native", part._native)
        part._native = {}
        return _replace(part._buffers, "scales", _changed(part.scales, scope, plant, 0), undo)
    slots = part._parameters if "weight" in part._parameters else part._buffers
    weight = slots.get("weight")
    # A convolution over tokens, as in state-space layers: [channels, inputs, width].
    if weight is None or not _is_plain(weight, 3 if isinstance(part, nn.Conv1d) else 2):
        raise ModelError(f"canary: the weight of {scope} can't be changed: it is {_kind(weight)}")
    axis = int(type(part).__name__ == "Conv1D")
    return _replace(slots, "weight", _changed(weight, scope, plant, axis), undo)


def _replace(slots: Slots, name: str, change: tuple[Tensor, int], undo: ExitStack) -> int:
    (after, channel), before = change, slots[name]
    undo.callback(slots.__setitem__, name, before)
    slots[name] = nn.Parameter(after, False) if isinstance(before, nn.Parameter) else after
    return channel


def _changed(before: Tensor, scope: str, plant: Plant, axis: int) -> tuple[Tensor, int]:
    """Return the tensor with its fault, and the channel: one that is not all 0."""
    if before.is_meta:
        raise ModelError(f"canary: the weight of {scope} is not in memory (streamed)")
    alive = before.detach().ne(0).movedim(axis, 0).flatten(1).any(1).nonzero().flatten()
    if not len(alive):
        raise ModelError(f"canary: the weight of {scope} is all 0")
    after, channel = before.detach().clone(), int(alive[plant.draw % len(alive)])
    chosen = after.select(axis, channel) if plant.fault == "channel" else after
    chosen.mul_(1 + plant.size)
    if torch.equal(after, before):
        what, kind = f"× {1 + plant.size:g} changes nothing at {scope}", before.dtype
        raise ModelError(f"canary: {what}: {kind} rounds it away")
    return after, channel


def _is_plain(tensor: Tensor, axes: int) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter)
    wide = tensor.is_floating_point() and tensor.element_size() > 1
    return plain and wide and tensor.ndim == axes


def _kind(weight: object) -> str:
    if not isinstance(weight, Tensor):
        return "computed from others" if weight is None else type(weight).__name__
    return f"{type(weight).__name__} of {weight.dtype} with {weight.ndim} axes"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
