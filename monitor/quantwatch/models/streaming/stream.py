"""Run a model whose layers get their values right before their forward and lose them afterwards.

Hooks on the layers do it, so that whoever runs the model (a plain forward, the probes of capture, a
module that runs again inside its layer) doesn't notice. They are made when the model is loaded,
before any other hook: a layer has its values when others look at its arguments, and keeps them
until the next layer begins, for those who look at its output. While a layer computes, a thread
reads the next one. So at most two layers have values: one that computes and one that is read.

All prompts of a batch go through a layer before the next is read: the reading costs as much for
one token as for thousands.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch.models.streaming.allocating import return_freed_blocks
from quantwatch.models.streaming.skeleton import Skeleton
from quantwatch.models.streaming.slabs import Pool, Slab

Change = Callable[[int], None]
"""Called with a layer's number once its stored values are there."""
_MARK = "quantization_status"
"""What compressed-tensors notes on a module it unpacks."""


class LayerStream:
    """The layers of one model that is never in memory as a whole."""

    def __init__(self, skeleton: Skeleton, device: torch.device) -> None:
        return_freed_blocks()
        self.layers = skeleton.layers
        self.paths = tuple(skeleton.layers)
        self.changes: list[Change] = []
        """What happens to a layer each time it was read: quantizing, faults."""
        self.packed: dict[str, nn.Module] = {}
        """Path → module that takes the stored values in place of the one that computes."""
        self._modules = tuple(skeleton.layers.values())
        self._source = skeleton.source
        self._device = device
        self._live: int | None = None
        self._next: tuple[int, Future[None]] | None = None
        self._blank: dict[int, _Blank] = {}
        self._slabs: dict[int, Slab] = {}
        self._pool = Pool.shared()
        self._slab_size = max(map(self._source.num_bytes, range(len(self._source))), default=0)
        self._reader = ThreadPoolExecutor(1, "quantwatch-layers")

    def attach(self, module: nn.Module, head: nn.Module) -> None:
        """Make the hooks: at the model's begin, at each layer, and at the head."""
        module.register_forward_pre_hook(lambda *_: self.release())
        for index, layer in enumerate(self._modules):
            layer.register_forward_pre_hook(lambda *_, index=index: self._enter(index))
        head.register_forward_pre_hook(lambda *_: self.release())

    def index_of(self, path: str) -> int | None:
        """Return the number of the layer that a module is in, None outside the layers."""
        inside = (n for n, layer in enumerate(self.paths) if f"{path}.".startswith(f"{layer}."))
        return next(inside, None)

    def visit(self, look: Change = lambda _: None) -> None:
        """Read every layer once, alone, and let `look` see it."""
        for index in range(len(self._modules)):
            self._read(index)
            look(index)
            self._drop(index)

    def release(self) -> None:
        """Drop all values that are there. Whatever is read next is read anew."""
        if self._next is not None:
            index, reading = self._next
            self._next = None
            reading.exception()  # a failure matters to whoever needs the layer, who reads it again
            self._drop(index)
        if self._live is not None:
            self._drop(self._live)
            self._live = None

    def _ahead(self, index: int) -> None:
        if index < len(self._modules):
            self._next = index, self._reader.submit(self._read, index)

    def _enter(self, index: int) -> None:
        if self._live == index:
            return
        if self._live is not None:
            self._drop(self._live)
            self._live = None
        if self._next is None or self._next[0] != index:
            self.release()
            self._ahead(index)
        assert self._next is not None
        reading = self._next[1]
        try:
            reading.result()
        except BaseException:
            self.release()
            raise
        self._next, self._live = None, index
        self._ahead(index + 1)

    def _read(self, index: int) -> None:
        with torch.no_grad():
            slab = self._slabs[index] = self._pool.take(self._slab_size)
            tensors = self._source.tensors(index, slab.take)
            layer, path = self._modules[index], self.paths[index]
            if index not in self._blank:
                packed = [m for p, m in self.packed.items() if p.startswith(f"{path}.")]
                self._blank[index] = _Blank([*layer.modules(), *packed])
            for name in list(tensors):
                self._put(layer, path, name, tensors.pop(name))
            for change in self.changes:
                change(index)

    def _put(self, layer: nn.Module, path: str, name: str, tensor: Tensor) -> None:
        where, _, leaf = name.rpartition(".")
        module = self.packed.get(where)
        if module is None:
            module = layer.get_submodule(where[len(path) + 1 :])
        _set(module, leaf, tensor.to(self._device))

    def _drop(self, index: int) -> None:
        blank = self._blank.get(index)
        if blank is not None:
            blank.restore()
        slab = self._slabs.pop(index, None)
        if slab is not None:
            self._pool.give(slab)


class _Blank:
    """What the modules of a layer hold while it has no values."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._held = [(m, dict(m._parameters), dict(m._buffers), _mark(m)) for m in modules]

    def restore(self) -> None:
        """Put it back."""
        for module, parameters, buffers, mark in self._held:
            _replace(module._parameters, parameters)
            _replace(module._buffers, buffers)
            if mark is not None:
                setattr(module, _MARK, mark)


def _mark(module: nn.Module) -> Any:
    return vars(module).get(_MARK)


def _replace(held: dict[str, Any], by: Mapping[str, Any]) -> None:
    held.clear()
    held.update(by)


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a parameter or buffer its values, in the dtype that the model holds it in."""
    if name in module._buffers:
        module._buffers[name] = tensor
        return
    blank = module._parameters[name]
    assert blank is not None
    wide = tensor.to(blank.dtype) if tensor.is_floating_point() else tensor
    module._parameters[name] = nn.Parameter(wide, requires_grad=False)
