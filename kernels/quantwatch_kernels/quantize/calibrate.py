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

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight, within_range
from quantwatch_kernels.quantize.awq import scale_layer
from quantwatch_kernels.quantize.decoder_layers import check_inputs
from quantwatch_kernels.quantize.experts import collect_expert_stats
from quantwatch_kernels.quantize.input_stats import InputStats, collect
from quantwatch_kernels.quantize.interpose import has_input_transform
from quantwatch_kernels.quantize.remember import remembering
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.walk import LayerWalk
from quantwatch_kernels.quantize.weights import quantize_layer

__all__ = ["Converted", "head_inputs", "quantize_layers"]


class Converted(NamedTuple):
    """A layer whose quantized values are in the model now, and what is to be reported of it."""

    layer: Layer
    weight: QuantizedWeight
    notes: tuple[str, ...]


def quantize_layers(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Sequence[Tensor] | None,
    head: InputStats | None = None,
) -> Iterator[Converted]:
    """Quantize `layers`, on token ids [B, T] where a spec needs calibration.

    `head` are `head_inputs` of the model as it is now, if they are known: a forward pass less.
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
        if layer.spec.calibrated:
            _require_tied_head(model, layer)
            head = head or head_inputs(model, inputs)
        yield _convert(layer, head if layer.spec.calibrated else None)
    rest = [layer for layer in layers if layer not in embeddings]
    inside: set[str] = set()
    for converted in _quantize_decoder(model, rest, inputs):
        inside.add(converted.layer.path)
        yield converted
    for layer in rest:
        if layer.path not in inside:
            named = (layer.name, layer.module, layer.weight.shape[1])
            stats = _model_stats(model, named, inputs) if layer.spec.calibrated else None
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
        called, uncalled = _by_input(walk, index, mine)
        with remembering(walk) as memory:
            for readers in called:
                yield from _quantize_readers(walk, index, readers, notes)
                for layer in readers if readers is not called[-1] else ():  # those run once more
                    memory.keep(layer.module)
            if uncalled or stacked:  # what is called after those was kept too early
                memory.forget()
            for layer in uncalled:
                yield from _quantize_readers(walk, index, [layer], notes)
            yield from _quantize_experts(walk, index, stacked)
            walk.run(index)


def _quantize_readers(
    walk: LayerWalk, index: int, readers: Sequence[Layer], notes: Mapping[str, tuple[str, ...]]
) -> Iterator[Converted]:
    """Quantize linear layers that read the same input."""
    stats = None
    if any(layer.spec.calibrated for layer in readers):
        stats = _layer_stats(walk, index, readers[0])
    for layer in readers:
        found = _convert(layer, stats)
        yield found._replace(notes=(*notes.get(layer.path, ()), *found.notes))


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


def _by_input(
    walk: LayerWalk, index: int, layers: Sequence[Layer]
) -> tuple[list[list[Layer]], list[Layer]]:
    """Group a decoder layer's linear layers by the tensor they read, in the order of calls.

    Returned beside them: those that the first input doesn't call, experts that it isn't sent to.
    """
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
    return groups, [layer for layer in layers if layer.path not in called]


def _layer_stats(walk: LayerWalk, index: int, layer: Layer) -> InputStats:
    watched = (layer.name, layer.module, layer.weight.shape[1])
    return collect([watched], walk.forwards(index))[layer.name]


def _model_stats(
    model: nn.Module, watched: tuple[str, nn.Module, int], inputs: Sequence[Tensor]
) -> InputStats:
    """Return the statistics of what a (name, module, number of inputs) reads in forward passes."""
    forwards = [partial(model, ids, use_cache=False) for ids in inputs]
    return collect([watched], forwards)[watched[0]]


def head_inputs(model: nn.Module, inputs: Sequence[Tensor]) -> InputStats:
    """Return the statistics of what the head reads, in forward passes over token ids [B, T].

    The same for every recipe that doesn't change the model before its weights are rounded. Raises
    ValueError for a model without a head, and for activations that aren't finite.
    """
    head = _head(model)
    if head is None:
        raise ValueError(f"{type(model).__name__} has no head whose inputs could be collected.")
    return _model_stats(model, ("the head", head, head.weight.shape[1]), inputs)


def _head(model: nn.Module) -> Any:
    find_head = getattr(model, "get_output_embeddings", None)
    return find_head() if callable(find_head) else None


def _require_tied_head(model: nn.Module, layer: Layer) -> None:
    head = _head(model)
    if head is None or head.weight is not layer.module.weight:
        raise ValueError(
            f"{layer.name} is only looked up, since no head is tied to it: "
            f"{layer.spec.method} has no inputs to calibrate on."
        )
