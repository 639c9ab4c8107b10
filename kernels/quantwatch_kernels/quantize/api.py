"""Quantize a model's linear layers in place, and say exactly what was and what wasn't done."""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT8
from quantwatch_kernels.quantize.affine import fake_quantize
from quantwatch_kernels.quantize.int4_linear import INT4_LINEAR, Int4Linear, int4_aten_why_not
from quantwatch_kernels.quantize.int8_linear import INT8_LINEAR, Int8Linear, int8_aten_why_not
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.registry import Fallback, record_fallback

__all__ = ["Execution", "QuantReport", "model_size", "quantize_"]

Execution = Literal["dequantized", "aten", "reference"]
Reasons = tuple[tuple[str, str], ...]

_ROUTER_NAMES = frozenset({"router", "gate", "shared_expert_gate"})


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


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer of the model: where it is, what it is called, its weight as [out, in]."""

    path: str
    name: str
    module: nn.Module
    transposed: bool

    @property
    def weight(self) -> Tensor:
        weight = self.module.get_parameter("weight").detach()
        return weight.T if self.transposed else weight

    @property
    def bias(self) -> nn.Parameter | None:
        bias = self.module.bias
        return bias if isinstance(bias, nn.Parameter) else None


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
    names = _names(model, scopes or {})
    layers, skipped = _sort_out(model, recipe, names)
    if not layers:
        listed = "; ".join(f"{name}: {reason}" for name, reason in skipped) or "it has no matrix"
        raise ValueError(f"recipe {recipe.name} would convert no layer of the model: {listed}.")
    before, num_weights = model_size(model)
    saved = sum(_saved_bytes(layer.weight, recipe) for layer in layers)
    fallbacks = [found for layer in layers if (found := _convert(model, layer, recipe, execution))]
    size = before - saved
    return QuantReport(
        converted=tuple(layer.name for layer in layers),
        skipped=skipped,
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


def _distinct(tensors: Iterator[nn.Parameter] | list[Tensor]) -> list[Tensor]:
    seen: dict[tuple[torch.device, int, int], Tensor] = {}
    for tensor in tensors:
        seen.setdefault((tensor.device, tensor.data_ptr() or id(tensor), tensor.numel()), tensor)
    return list(seen.values())


def _saved_bytes(weight: Tensor, recipe: Recipe) -> int:
    rows, columns = weight.shape
    groups = -(-columns // recipe.granularity.group_size(columns))
    packed = recipe.weights.num_bytes(rows, columns) + 4 * rows * groups
    return weight.numel() * weight.element_size() - packed


def _names(model: nn.Module, scopes: Mapping[str, str]) -> dict[str, str]:
    """Name each module path: its scope, "head" for the output embedding, else the path."""
    names = {path: scopes.get(path, path) for path, _ in model.named_modules()}
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    for path, module in model.named_modules():
        if module is head and path not in scopes:
            names[path] = "head"
    return names


def _sort_out(
    model: nn.Module, recipe: Recipe, names: Mapping[str, str]
) -> tuple[list[_Layer], Reasons]:
    """Return the layers to convert, and the reason for every other parameter that is no vector."""
    owners = _owners(model)
    layers, skipped = [], []
    for path, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            layer = _Layer(path, names[path], module, type(module).__name__ == "Conv1D")
            reason = _why_skip(layer, parameter, recipe, owners)
            if reason is None:
                layers.append(layer)
            elif parameter_name == "weight":
                skipped.append((layer.name, reason))
            else:
                skipped.append((f"{layer.name}.{parameter_name}", reason))
    return layers, tuple(skipped)


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Return the module paths that hold each parameter, by its address."""
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter.data_ptr() or id(parameter), []).append(path)
    return owners


def _why_skip(
    layer: _Layer, parameter: nn.Parameter, recipe: Recipe, owners: Mapping[int, list[str]]
) -> str | None:
    if isinstance(layer.module, nn.Embedding):
        return "embeddings are never quantized"
    if parameter.ndim == 3:
        return f"stacked weights of shape {list(parameter.shape)} are not supported yet"
    if not (isinstance(layer.module, nn.Linear) or layer.transposed) or parameter.ndim != 2:
        return f"{type(layer.module).__name__} is not a linear layer"
    if not parameter.is_floating_point():
        return f"its weight is already stored as {parameter.dtype}"
    excluding = _excluded_by(layer, recipe)
    if excluding is not None:
        return f"excluded by {excluding!r}"
    others = [p for p in owners[parameter.data_ptr() or id(parameter)] if p != layer.path]
    return f"its weight is tied to {', '.join(others)}" if others else None


def _excluded_by(layer: _Layer, recipe: Recipe) -> str | None:
    candidates = {text for whole in (layer.name, layer.path) for text in (whole, _last(whole))}
    if _last(layer.path) in _ROUTER_NAMES:
        candidates.add("router")
    matches = (g for g in recipe.exclude if any(fnmatch.fnmatchcase(c, g) for c in candidates))
    return next(matches, None)


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _convert(
    model: nn.Module, layer: _Layer, recipe: Recipe, execution: Execution
) -> tuple[str, str] | None:
    """Convert one layer; returns its name and the reason when `execution` can't compute it."""
    weight = layer.weight
    group_size = recipe.granularity.group_size(weight.shape[1])
    int8 = recipe.weights is INT8
    reason = _aten_why_not(weight, group_size, int8) if execution == "aten" else None
    if execution == "dequantized" or reason is not None:
        with torch.no_grad():
            weight.copy_(fake_quantize(weight, recipe))
    else:
        linear = (Int8Linear if int8 else Int4Linear)(weight, layer.bias, group_size, execution)
        model.set_submodule(layer.path, linear.train(model.training))
    if reason is None:
        return None
    op = INT8_LINEAR if int8 else INT4_LINEAR
    record_fallback(Fallback(op.name, "aten", "dequantized", reason))
    return layer.name, reason


def _aten_why_not(weight: Tensor, group_size: int, int8: bool) -> str | None:
    if weight.device.type != "cpu":
        return f"the native kernels run on CPU only, not {weight.device.type}"
    rows, columns = weight.shape
    return (int8_aten_why_not if int8 else int4_aten_why_not)(rows, columns, group_size)
