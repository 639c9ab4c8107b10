"""Experts stacked in one parameter: what each of them is fed, and what it gives.

Such experts are no modules, so no hook sees them. transformers multiplies them in a loop ("eager")
or in one grouped product; the loop multiplies x by `stack[e]`, a view of the stack, in `linear`
(stored [out, in]) or `matmul` (stored [in, out]). Those calls are watched: the storage tells which
stack it is, the offset which expert. The loop is chosen for as long as it is watched. Llama 4 and
Inkling's shared experts multiply a whole stack by a batch [E, n, in] in `bmm`; there tokens that
aren't routed to an expert are rows of zeros, which are left out. Given up: experts multiplied in
any other way (nothing of them is seen, and who asks gets an error).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quantwatch_kernels.quantize.input_stats import InputStats
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.stacks import num_experts

__all__ = ["collect_expert_stats", "expert_layers", "loop_over_experts", "watching_experts"]

Note = Callable[[str, Tensor, Tensor], None]
"""(key of the layer, input [n, in], output [n, out])"""


_MATMUL = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})
_PRODUCTS = _MATMUL | {nn.functional.linear, torch.mm, Tensor.mm}
_BATCHED = _MATMUL | {torch.bmm, Tensor.bmm}


class _Watch(TorchFunctionMode):
    def __init__(self, layers: Sequence[Layer], note: Note) -> None:
        super().__init__()
        self._note = note
        self._keys = {_place(layer.weight): layer.key for layer in layers}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and len(args) > 1 and args[1].ndim == 2:
            self._see(_place(args[1]), args[0].detach(), result.detach())
        elif func in _BATCHED and len(args) > 1 and args[1].ndim == 3:
            for expert, weight in enumerate(args[1]):
                x, y = args[0][expert].detach(), result[expert].detach()
                routed = (x != 0).any(-1)
                self._see(_place(weight), x[routed], y[routed])
        return result

    def _see(self, place: tuple[int, int], x: Tensor, y: Tensor) -> None:
        key = self._keys.get(place)
        if key is not None:
            self._note(key, x, y)


def _place(weight: Tensor) -> tuple[int, int]:
    return weight.untyped_storage().data_ptr(), int(weight.storage_offset())


@contextmanager
def loop_over_experts(model: nn.Module) -> Iterator[None]:
    """Inside, stacked experts are multiplied one after another."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(each): each for each in found if hasattr(each, "_experts_implementation")}
    kept = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = "eager"
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = kept[key]


@contextmanager
def watching_experts(model: nn.Module, layers: Sequence[Layer], note: Note) -> Iterator[None]:
    """Inside, `note` is called for every product with one of these experts' matrices."""
    with loop_over_experts(model), _Watch(layers, note):
        yield


def collect_expert_stats(
    model: nn.Module, layers: Sequence[Layer], forwards: Iterable[Callable[[], object]]
) -> dict[str, InputStats]:
    """Return the statistics of each expert's inputs by key over forward passes.

    Raises ValueError when not one of them was reached, and for inputs that aren't finite.
    """
    stats = {layer.key: InputStats(layer.weight.shape[1]) for layer in layers}
    names = {layer.key: layer.name for layer in layers}

    def note(key: str, x: Tensor, _: Tensor) -> None:
        stats[key].add(x)
        if not stats[key].finite:
            raise ValueError(f"{names[key]}: the activations that reach it aren't finite.")

    with torch.no_grad(), watching_experts(model, layers, note):
        for forward in forwards:
            forward()
    if layers and not any(found.tokens for found in stats.values()):
        raise ValueError(
            f"{layers[0].name}: no product with it was seen; "
            f"{type(layers[0].module).__name__} doesn't multiply its experts one by one."
        )
    return stats


def expert_layers(layer: Layer) -> Iterator[Layer]:
    """Yield one layer per expert of a stack, `layer` being the stack [E, .., ..] itself."""
    for expert in range(num_experts(layer.module, layer.parameter)):
        name = f"{layer.name}.{expert}.{layer.parameter}"
        yield Layer(layer.path, name, layer.module, layer.spec, layer.parameter, expert)
