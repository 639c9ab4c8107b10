"""Quantize a model in place, and say exactly what was and what wasn't done."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight, within_range
from quantwatch_kernels.quantize.calibrate import quantize_layers
from quantwatch_kernels.quantize.input_stats import InputStats
from quantwatch_kernels.quantize.int4_linear import INT4_LINEAR, int4_aten_why_not
from quantwatch_kernels.quantize.int8_linear import INT8_LINEAR, int8_aten_why_not
from quantwatch_kernels.quantize.integer_layers import IntegerLayer, integer_layer
from quantwatch_kernels.quantize.interpose import carry_transforms
from quantwatch_kernels.quantize.packed_embedding import (
    PackedEmbedding,
    install_embedding,
    tied_heads,
    why_not_packed_embedding,
)
from quantwatch_kernels.quantize.packed_linear import LOWBIT_LINEAR, LinearOp, PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe, WeightSpec
from quantwatch_kernels.quantize.selection import (
    Layer,
    Reasons,
    Selection,
    scope_names,
    select,
)
from quantwatch_kernels.quantize.stages import after_weights, before_weights
from quantwatch_kernels.quantize.w8a8_linear import int_mm_why_not
from quantwatch_kernels.registry import Fallback, record_fallback

__all__ = [
    "Execution",
    "QuantReport",
    "checked_selection",
    "linear_op",
    "model_size",
    "quantize_",
]

Execution = Literal["dequantized", "aten", "reference"]


@dataclass(frozen=True, slots=True)
class QuantReport:
    """What `quantize_` did. Places are named by scope, or by module path where there is none."""

    converted: tuple[str, ...]
    skipped: Reasons
    """(scope or path, reason) of every matrix that stays in full precision."""
    fallbacks: Reasons
    """(scope or path, reason) of converted layers that `execution` can't compute."""
    size_bytes: int
    """All parameters and buffers, tied ones once; quantized weights as packed, scales included."""
    bits_per_weight: float
    """8 · size_bytes ÷ number of parameters."""
    notes: Reasons = ()
    """(scope or path, what was retried, fell back or is stored otherwise than asked)."""


def quantize_(
    model: nn.Module,
    recipe: Recipe,
    *,
    execution: Execution = "dequantized",
    scopes: Mapping[str, str] | None = None,
    calibration: Sequence[Tensor] | None = None,
    head: InputStats | None = None,
) -> QuantReport:
    """Quantize the linear layers of `model` in place; `scopes` maps module paths to their names.

    `calibration` are token ids [B, T] without padding, for recipes that need activations; `head`
    are `head_inputs` of this model on them, if the caller has them from another recipe; not used
    where the recipe rotates or smooths the model first.

    `dequantized` writes the quantized values into the weights, so that the model stays what it was;
    `aten` and `reference` replace each layer by a packed one. A layer that the native kernel can't
    do is computed dequantized, counted in the registry and listed in `fallbacks`. Raises ValueError
    for an unknown execution, when not a single layer would be converted, when calibration is
    missing, and for weights or activations that aren't finite. The model is then to be thrown away.
    """
    names = scope_names(model, scopes or {})
    selection = checked_selection(model, recipe, names, execution, calibration)
    notes = before_weights(model, recipe, calibration, names)
    size, num_weights = model_size(model)
    known = None if recipe.changes_model else head
    fallbacks, converted = [], []
    for layer, quantized, found in quantize_layers(model, selection.layers, calibration, known):
        weight = layer.weight
        size += quantized.num_bytes - weight.numel() * weight.element_size()
        notes += [(layer.name, note) for note in found]
        if execution != "dequantized":  # the values are in the model already
            converted.append((layer, quantized))
    # Only now: calibration runs on the quantized values in float, whatever computes them later.
    for layer, quantized in converted:
        integer, why = integer_layer(layer, recipe.activations)
        if why is not None and execution == "aten":
            notes.append((layer.name, f"its rounded inputs are multiplied in floats: {why}"))
        if reason := _install(model, layer, quantized, execution, integer):
            fallbacks.append((layer.name, reason))
    held = model_size(model)[0]
    notes += after_weights(model, recipe, selection.layers, calibration, names)
    size += model_size(model)[0] - held  # static scales
    return QuantReport(
        converted=tuple(layer.name for layer in selection.layers),
        skipped=selection.skipped,
        fallbacks=tuple(fallbacks),
        size_bytes=size,
        bits_per_weight=8 * size / num_weights,
        notes=tuple(notes),
    )


def checked_selection(
    model: nn.Module,
    recipe: Recipe,
    names: Mapping[str, str],
    execution: str,
    calibration: Sequence[Tensor] | None,
) -> Selection:
    """Return what is to be converted. Raises ValueError for what `quantize_` refuses at once."""
    if execution not in ("dequantized", "aten", "reference"):
        raise ValueError(
            f"unknown execution {execution!r}; allowed are dequantized, aten and reference."
        )
    selection = select(model, recipe, names)
    if not selection.layers:
        listed = "; ".join(f"{name}: {why}" for name, why in selection.skipped)
        raise ValueError(
            f"recipe {recipe.name} would convert no layer of the model: "
            f"{listed or 'it has no matrix'}."
        )
    if recipe.calibrated and not calibration:
        raise ValueError(f"recipe {recipe.name} needs calibration inputs; there are none.")
    return selection


def model_size(model: nn.Module) -> tuple[int, int]:
    """Return (bytes of parameters and buffers, number of parameters); shared memory counts once."""
    parameters = _distinct(model.parameters())
    num_weights = sum(tensor.numel() for tensor in parameters)
    tensors = _distinct([*parameters, *model.buffers()])
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors), num_weights


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    seen: dict[tuple[torch.device, int, int], Tensor] = {}
    for tensor in tensors:
        seen.setdefault((tensor.device, tensor.data_ptr() or id(tensor), tensor.numel()), tensor)
    return list(seen.values())


def linear_op(spec: WeightSpec) -> LinearOp:
    """Return the operator that multiplies weights of this kind."""
    return {8: INT8_LINEAR, 4: INT4_LINEAR}.get(spec.format.bits, LOWBIT_LINEAR)


def _install(
    model: nn.Module,
    layer: Layer,
    quantized: QuantizedWeight,
    execution: Execution,
    integer: IntegerLayer | None,
) -> str | None:
    """Put quantized values or a packed layer in place; returns why `execution` can't compute it."""
    op = linear_op(layer.spec)
    embedding = isinstance(layer.module, nn.Embedding)
    if execution == "dequantized":
        reason = None
    elif integer is not None:
        reason = int_mm_why_not() if execution == "aten" else None
    elif layer.spec.scales == "stepped":
        reason = "only layers that multiply integers keep stepped scales"
    else:
        reason = _why_not(model, layer, op, execution)
    unpackable = embedding and why_not_packed_embedding(model, layer.module) is not None
    if execution == "dequantized" or unpackable or (reason is not None and not embedding):
        with torch.no_grad():
            layer.weight.copy_(within_range(quantized.values, layer.weight.dtype))
    elif embedding:
        # Looked up either way: what can't be computed natively is the tied head alone.
        backend = execution if reason is None else "dequantized"
        packed = PackedEmbedding(quantized, op, backend, layer.weight.dtype)
        install_embedding(model, layer.path, packed)
    else:
        if integer is None:
            linear = PackedLinear(quantized, layer.bias, op, execution)
        else:
            linear = integer.make(quantized, layer.bias, execution)
        carry_transforms(layer.module, linear)
        model.set_submodule(layer.path, linear.train(model.training))
    if reason is not None:
        name = op.name if integer is None else integer.op
        record_fallback(Fallback(name, execution, "dequantized", reason))
    return reason


def _why_not(model: nn.Module, layer: Layer, op: LinearOp, execution: Execution) -> str | None:
    if isinstance(layer.module, nn.Embedding):
        reason = why_not_packed_embedding(model, layer.module)
        if reason is not None or not tied_heads(model, layer.module):
            return reason
    if layer.expert is not None:
        return "stacked experts are multiplied in floats"
    if execution == "reference":
        return None
    weight = layer.weight
    if weight.device.type != "cpu":
        return f"the native kernels run on CPU only, not {weight.device.type}"
    if op is LOWBIT_LINEAR:
        return f"no native kernel multiplies {layer.spec.format.name} weights"
    rows, columns = weight.shape
    check = int8_aten_why_not if op is INT8_LINEAR else int4_aten_why_not
    return check(rows, columns, layer.spec)
