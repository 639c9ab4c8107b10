"""Quantize the weights of a model in calibration order: each layer sees what the earlier ones give.

1. The embedding, if it is converted. Tied to the head, it is one matrix: GPTQ takes the Hessian of
   the head's inputs in the model as it comes.
2. Decoder layer by decoder layer, and inside a layer by what reads the same input: q, k, v; o;
   gate, up; down. The inputs of each come from all that is already quantized, and linear layers
   with the same input share one Hessian and its factor.
3. What lies outside the layers (an untied head), last.

Values are written into the model as they are found. Nothing is random but stochastic rounding,
which is seeded by the layer's path: the same model, recipe and inputs give the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight, within_range
from quantwatch_kernels.quantize.awq import scale_layer
from quantwatch_kernels.quantize.experts import collect_expert_stats
from quantwatch_kernels.quantize.input_stats import InputStats, collect
from quantwatch_kernels.quantize.interpose import has_input_transform
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.walk import LayerWalk, check_inputs
from quantwatch_kernels.quantize.weights import quantize_layer

__all__ = ["Converted", "quantize_layers"]


class Converted(NamedTuple):
    """A layer whose quantized values are in the model now, and what is to be reported of it."""

    layer: Layer
    weight: QuantizedWeight
    notes: tuple[str, ...]


def quantize_layers(
    model: nn.Module, layers: Sequence[Layer], inputs: Sequence[Tensor] | None
) -> Iterator[Converted]:
    """Quantize `layers`, on token ids [B, T] where a spec needs calibration.

    Raises ValueError if it does and there are none, for weights or activations that aren't finite,
    and for a model that can't be walked.
    """
    for layer in layers:
        if not bool(torch.isfinite(layer.weight).all()):
            bad = int((~torch.isfinite(layer.weight)).sum())
            raise ValueError(f"{layer.name}: {bad} weights aren't finite; it can't be quantized.")
    wanting = [layer.name for layer in layers if layer.spec.calibrated]
    if not wanting:
        yield from (_convert(layer, None) for layer in layers)
        return
    if inputs is None:
        raise ValueError(
            f"{layers[0].spec.method} needs calibration inputs for {wanting[0]}; there are none."
        )
    check_inputs(model, inputs)
    embeddings = [layer for layer in layers if isinstance(layer.module, nn.Embedding)]
    for layer in embeddings:
        yield _convert(layer, _head_stats(model, layer, inputs) if layer.spec.calibrated else None)
    rest = [layer for layer in layers if layer not in embeddings]
    inside: set[str] = set()
    for converted in _quantize_decoder(model, rest, inputs):
        inside.add(converted.layer.path)
        yield converted
    for layer in rest:
        if layer.path not in inside:
            stats = _model_stats(model, layer, inputs) if layer.spec.calibrated else None
            yield _convert(layer, stats)


def _convert(layer: Layer, stats: InputStats | None) -> Converted:
    quantized, notes = quantize_layer(layer, stats)
    with torch.no_grad():
        layer.weight.copy_(within_range(quantized.values, layer.weight.dtype))
    if not bool(torch.isfinite(layer.weight).all()):
        bad = int((~torch.isfinite(layer.weight)).sum())
        raise ValueError(f"{layer.name}: {bad} of its quantized weights aren't finite.")
    return Converted(layer, quantized, notes)


def _quantize_decoder(
    model: nn.Module, layers: Sequence[Layer], inputs: Sequence[Tensor]
) -> Iterator[Converted]:
    walk = LayerWalk(model, inputs)
    for index, (path, _) in enumerate(walk.layers):
        mine = [layer for layer in layers if layer.path.startswith(f"{path}.")]
        stacked = [layer for layer in mine if layer.expert is not None]
        mine = [layer for layer in mine if layer.expert is None]
        notes = scale_layer(walk, index, [la for la in mine if la.spec.method == "awq"])
        for readers in _by_input(walk, index, mine):
            stats = None
            if any(layer.spec.calibrated for layer in readers):
                stats = _layer_stats(walk, index, readers[0])
            for layer in readers:
                found = _convert(layer, stats)
                yield found._replace(notes=(*notes.get(layer.path, ()), *found.notes))
        yield from _quantize_experts(walk, index, stacked)
        walk.run(index)


def _quantize_experts(walk: LayerWalk, index: int, layers: Sequence[Layer]) -> Iterator[Converted]:
    """Quantize stacked experts, each on its own tokens: all first matrices, then all second ones.

    After the rest of the layer, since they read what its attention gives.
    """
    for parameter in dict.fromkeys((layer.path, layer.parameter) for layer in layers):
        experts = [layer for layer in layers if (layer.path, layer.parameter) == parameter]
        stats: dict[str, InputStats] = {}
        if any(layer.spec.calibrated for layer in experts):
            stats = collect_expert_stats(walk.model, experts, walk.forwards(index))
        for layer in experts:
            found = _convert(layer, stats.get(layer.key))
            unscaled = layer.spec.method == "awq"
            notes = ("not scaled: AWQ folds no scales into stacked experts",) if unscaled else ()
            yield found._replace(notes=(*notes, *found.notes))


def _by_input(walk: LayerWalk, index: int, layers: Sequence[Layer]) -> list[list[Layer]]:
    """Group a decoder layer's linear layers by the tensor they read, in the order of calls."""
    inputs: list[Tensor] = []  # kept, so that no address is used twice
    groups: list[list[Layer]] = []
    called: set[str] = set()

    def note(layer: Layer, x: Tensor) -> None:
        if layer.path in called:
            return
        called.add(layer.path)
        # Only the first reader's input is collected, so a transform of its own sets one apart.
        own = has_input_transform(layer.module)
        for known, group in zip(inputs, groups, strict=True):
            if known is x and not own:
                group.append(layer)
                return
        inputs.append(x)
        groups.append([layer])

    def hook_of(layer: Layer) -> Callable[..., None]:
        return lambda _, args: note(layer, args[0])

    hooks = [layer.module.register_forward_pre_hook(hook_of(layer)) for layer in layers]
    try:
        with torch.no_grad():
            walk.call(index, 0, walk.hidden[0])
    finally:
        for hook in hooks:
            hook.remove()
    return groups + [[layer] for layer in layers if layer.path not in called]


def _layer_stats(walk: LayerWalk, index: int, layer: Layer) -> InputStats:
    watched = (layer.name, layer.module, layer.weight.shape[1])
    return collect([watched], walk.forwards(index))[layer.name]


def _model_stats(
    model: nn.Module, layer: Layer, inputs: Sequence[Tensor], reader: nn.Module | None = None
) -> InputStats:
    """Return the statistics of what `reader` (the layer itself) reads in whole forward passes."""
    watched = (layer.name, reader or layer.module, layer.weight.shape[1])
    forwards = [partial(model, ids, use_cache=False) for ids in inputs]
    return collect([watched], forwards)[layer.name]


def _head_stats(model: nn.Module, layer: Layer, inputs: Sequence[Tensor]) -> InputStats:
    """Return the statistics of the head's inputs; raises ValueError if no head is tied to it."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if head is None or head.weight is not layer.module.weight:
        raise ValueError(
            f"{layer.name} is only looked up, since no head is tied to it: "
            f"{layer.spec.method} has no inputs to calibrate on."
        )
    return _model_stats(model, layer, inputs, head)
