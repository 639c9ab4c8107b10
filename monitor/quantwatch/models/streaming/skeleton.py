"""A model as transformers builds it, its decoder layers without values.

`from_pretrained` does everything it does else; only the step that fills a model from files is
another: embedding, norm and head get their values, the layers are checked for missing weights and
wrong shapes, all at once, since such a step goes through the whole model whatever it brings, and
stay on the meta device. A quantized checkpoint's layers are really read for that, since some
conversions need values: one at a time, small ones together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantwatch.errors import ModelError
from quantwatch.models.landmarks import find_embedding, find_layers
from quantwatch.models.streaming.mapped import LazyTensor, MappedFile
from quantwatch.models.streaming.sources import LayerSource, Names

_READ_BYTES = 1 << 26
"""Of the layers that are read at once to be checked, if they are more than one."""


@dataclass(slots=True)
class Skeleton:
    """Where a model's layers are, and where their values come from."""

    layers: dict[str, nn.Module]
    """Path → module, in order."""
    source: LayerSource


def streamed_class(kind: type, found: list[Skeleton]) -> type:
    """Return a class whose `from_pretrained` leaves the layers empty and adds to `found`.

    What it makes has to get its own class back.
    """

    def load(
        model: Any, _: Any, files: Sequence[str], load_config: Any, expected: Any = None
    ) -> tuple[Any, None]:
        layers = _layers_of(model)
        tensors = {n: t for file in files for n, t in MappedFile(Path(file)).lazy().items()}
        names = Names(model, load_config)
        _refuse_shared(model, layers)
        outside, inside = _split(names, tensors, list(layers))
        fill: Any = kind._load_pretrained_model  # type: ignore[attr-defined]
        info, _ = fill(model, outside, None, load_config, expected)
        source = LayerSource(model, load_config, inside)
        sizes = [source.num_bytes(index) for index in range(len(source))]
        limit = math.inf if load_config.hf_quantizer is None else _READ_BYTES
        for group in _groups(sizes, limit):
            stored = {name: tensor for index in group for name, tensor in inside[index].items()}
            part = [*layers.values()][group.start : group.stop], stored
            _merge(info, _check_layers(fill, model, load_config, part))
        found.append(Skeleton(layers, source))
        return info, None

    body = {"_load_pretrained_model": staticmethod(load), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    path = find_layers(model, find_embedding(model))
    modules = dict(model.get_submodule(path)._modules)
    if len({id(module) for module in modules.values()}) < len(modules):
        raise ModelError(f"{path} lists a layer twice: it can't be streamed")
    return {f"{path}.{name}": module for name, module in modules.items() if module is not None}


def _refuse_shared(model: Any, layers: Mapping[str, nn.Module]) -> None:
    """Refuse weights that a layer shares with anything: they would be read twice and differ."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name in (name for pair in tied.items() for name in pair):
        if any(name.startswith(f"{path}.") for path in layers):
            raise ModelError(f"{name} is tied to another weight: the model can't be streamed")


def _split(
    names: Names, tensors: Mapping[str, LazyTensor], layers: Sequence[str]
) -> tuple[dict[str, LazyTensor], list[dict[str, LazyTensor]]]:
    """Sort a checkpoint's tensors into those outside the layers and those of each layer."""
    outside: dict[str, LazyTensor] = {}
    inside: list[dict[str, LazyTensor]] = [{} for _ in layers]
    for key, tensor in tensors.items():
        name, _ = names.of(key)
        at = next((n for n, path in enumerate(layers) if name.startswith(f"{path}.")), None)
        (outside if at is None else inside[at])[key] = tensor
    return outside, inside


def _groups(sizes: Sequence[int], limit: float) -> Iterator[range]:
    """Yield runs of layers that take at most so many bytes together, or are one."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


def _check_layers(
    fill: Any, model: Any, load_config: Any, part: tuple[list[nn.Module], Mapping[str, LazyTensor]]
) -> Any:
    """Load layers as transformers does, take their values away again; return what it reports."""
    layers, tensors = part
    if load_config.hf_quantizer is not None:
        info, _ = fill(model, dict(tensors), None, load_config)
        for layer in layers:
            empty_(layer)
        return info
    blank = {name: tensor.without_values for name, tensor in tensors.items()}
    info, _ = fill(model, blank, None, replace(load_config, device_map={"": "meta"}))
    return info


def empty_(layer: nn.Module) -> None:
    """Take the values of a layer's parameters and stored buffers away."""
    for module, name, tensor in _stored(layer):
        blank: Any = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            blank = nn.Parameter(blank, requires_grad=False)
        blank._is_hf_initialized = True  # else transformers would make it at random
        (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[name] = blank


def _stored(layer: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in layer.modules():
        kept = {
            n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set
        }
        for name, tensor in [*module._parameters.items(), *kept.items()]:
            if tensor is not None:
                yield module, name, tensor


def _merge(info: Any, other: Any) -> None:
    """Add what was found out about one layer; missing is what nothing has brought."""
    info.missing_keys &= other.missing_keys
    info.unexpected_keys |= other.unexpected_keys
    info.mismatched_keys |= other.mismatched_keys
    info.conversion_errors |= other.conversion_errors
    info.error_msgs += other.error_msgs
