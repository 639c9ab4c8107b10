"""Quantize a model in place, and say exactly what was and what wasn't done."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight, quantize_weight
from quantwatch_kernels.quantize.int4_linear import INT4_LINEAR, int4_aten_why_not
from quantwatch_kernels.quantize.int8_linear import INT8_LINEAR, int8_aten_why_not
from quantwatch_kernels.quantize.packed_linear import LOWBIT_LINEAR, LinearOp, PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe, WeightSpec
from quantwatch_kernels.quantize.selection import Layer, Reasons, scope_names, select
from quantwatch_kernels.registry import Fallback, record_fallback

__all__ = ["Execution", "QuantReport", "linear_op", "model_size", "quantize_"]

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


def quantize_(
    model: nn.Module,
    recipe: Recipe,
    *,
    execution: Execution = "dequantized",
    scopes: Mapping[str, str] | None = None,
) -> QuantReport:
    """Quantize the linear layers of `model` in place; `scopes` maps module paths to their names.

    `dequantized` writes the quantized values into the weights, so that the model stays what it was;
    `aten` and `reference` replace each layer by a packed one. A layer that the native kernel can't
    do is computed dequantized, counted in the registry and listed in `fallbacks`. Raises ValueError
    for an unknown execution and when not a single layer would be converted.
    """
    if execution not in ("dequantized", "aten", "reference"):
        raise ValueError(
            f"unknown execution {execution!r}; allowed are dequantized, aten and reference."
        )
    selection = select(model, recipe, scope_names(model, scopes or {}))
    if not selection.layers:
        listed = "; ".join(f"{name}: {why}" for name, why in selection.skipped)
        raise ValueError(
            f"recipe {recipe.name} would convert no layer of the model: "
            f"{listed or 'it has no matrix'}."
        )
    size, num_weights = model_size(model)
    fallbacks = []
    for layer in selection.layers:
        weight = layer.weight
        quantized = quantize_weight(weight, layer.spec)
        size += quantized.num_bytes - weight.numel() * weight.element_size()
        if reason := _install(model, layer, quantized, execution):
            fallbacks.append((layer.name, reason))
    return QuantReport(
        converted=tuple(layer.name for layer in selection.layers),
        skipped=selection.skipped,
        fallbacks=tuple(fallbacks),
        size_bytes=size,
        bits_per_weight=8 * size / num_weights,
    )


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
    model: nn.Module, layer: Layer, quantized: QuantizedWeight, execution: Execution
) -> str | None:
    """Put quantized values or a packed layer in place; returns why `execution` can't compute it."""
    op = linear_op(layer.spec)
    reason = None if execution == "dequantized" else _why_not(layer, op, execution)
    if execution == "dequantized" or reason is not None:
        with torch.no_grad():
            layer.weight.copy_(quantized.values)
    else:
        linear = PackedLinear(quantized, layer.bias, op, execution)
        model.set_submodule(layer.path, linear.train(model.training))
    if reason is not None:
        record_fallback(Fallback(op.name, execution, "dequantized", reason))
    return reason


def _why_not(layer: Layer, op: LinearOp, execution: Execution) -> str | None:
    if isinstance(layer.module, nn.Embedding):
        return "an embedding is looked up, not multiplied"
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
