"""The dtype of the residual stream that leaves a layer: float32, bfloat16 or float16.

Narrower than the model computes: rounded and widened again. Wider: the layer's sums are made in
that dtype (its input is widened), norms hand their result on in the dtype of the weights, and
layers that aren't named round their output back. Values beyond float16's 65504 become infinite,
stay infinite and are counted (`residual_overflows`).
"""

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.blocks import norm_children
from quantwatch_kernels.quantize.interpose import interpose
from quantwatch_kernels.quantize.walk import find_decoder_layers

__all__ = ["residual_overflows", "round_residual_"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Notes = list[tuple[str, str]]


class _RoundsStream(nn.Module):
    """A decoder layer whose output has another dtype than it was made in."""

    stream_dtype: torch.dtype
    compute_dtype: torch.dtype
    num_overflows: int

    @property
    def widens(self) -> bool:
        return self.stream_dtype.itemsize > self.compute_dtype.itemsize

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.widens:
            hidden_states = hidden_states.to(self.stream_dtype)
        elif hidden_states.dtype != self.compute_dtype:
            hidden_states = hidden_states.to(self.compute_dtype)
        output = super().forward(hidden_states, *args, **kwargs)
        if isinstance(output, tuple):
            return (self._round(output[0]), *output[1:])
        return self._round(output)

    def _round(self, hidden: Tensor) -> Tensor:
        rounded = hidden.to(self.stream_dtype)
        lost = torch.isinf(rounded) & torch.isfinite(hidden)
        self.num_overflows += int(lost.sum())
        return rounded if self.widens else rounded.to(self.compute_dtype)


class _HandsOnComputeDtype(nn.Module):
    """A norm that takes a wide stream and hands its result on in the weights' dtype."""

    compute_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(*args, **kwargs)
        return output.to(self.compute_dtype)


def round_residual_(
    model: nn.Module,
    dtypes: tuple[tuple[str, torch.dtype], ...],
    scopes: Mapping[str, str] | None = None,
) -> Notes:
    """Round what leaves each layer to the dtype of the first glob that matches it.

    A glob is compared with the layer's scope, its path and its number. Returns (name, what was
    done). Raises ValueError for another dtype and for a glob that matches no layer.
    """
    for glob, dtype in dtypes:
        if dtype not in _DTYPES:
            allowed = "float32, bfloat16 or float16"
            raise ValueError(f"residual_dtype {glob!r} is {allowed}; it is {dtype}.")
    notes: Notes = []
    used: set[str] = set()
    layers = find_decoder_layers(model)
    for path, layer in layers:
        name = (scopes or {}).get(path, path)
        aliases = {name, path, path.rpartition(".")[2]}
        matching = [(g, d) for g, d in dtypes if any(fnmatch.fnmatchcase(a, g) for a in aliases)]
        used |= {glob for glob, _ in matching}
        if matching:
            _round_layer(layer, matching[0][1])
            notes.append((name, f"its output is rounded to {str(matching[0][1])[6:]}"))
    for glob, _ in dtypes:
        if glob not in used:
            raise ValueError(f"residual_dtype {glob!r} matches none of {len(layers)} layers.")
    if any(isinstance(layer, _RoundsStream) and layer.widens for _, layer in layers):
        for _, layer in layers:
            if not isinstance(layer, _RoundsStream):  # it doesn't pass a wide stream on
                _round_layer(layer, _compute_dtype(layer))
        _let_norms_narrow(model, layers)
    return notes


def _round_layer(layer: nn.Module, dtype: torch.dtype) -> None:
    compute = _compute_dtype(layer)
    interpose(layer, _RoundsStream)
    layer.stream_dtype, layer.compute_dtype = dtype, compute  # type: ignore[assignment]
    layer.num_overflows = 0  # type: ignore[assignment]


def _compute_dtype(layer: nn.Module) -> torch.dtype:
    """Return the dtype of a layer's matrices; of its norms if they are all packed."""
    floats = (p.dtype for p in layer.parameters() if p.is_floating_point() and p.ndim >= 2)
    vectors = (p.dtype for p in layer.parameters() if p.is_floating_point())
    return next(floats, None) or next(vectors, torch.get_default_dtype())


def _let_norms_narrow(model: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
    """Let the norms of the layers and behind them take a wider stream than they hand on."""
    decoder = model.get_submodule(layers[0][0].rpartition(".")[0].rpartition(".")[0])
    for module in (decoder, *(layer for _, layer in layers)):
        for _, norm in norm_children(module):
            interpose(norm, _HandsOnComputeDtype)
            norm.compute_dtype = _compute_dtype(layers[0][1])  # type: ignore[assignment]


def residual_overflows(model: nn.Module) -> dict[str, int]:
    """Return path → number of values that a narrow residual stream made infinite, where any."""
    return {
        path: module.num_overflows
        for path, module in model.named_modules()
        if isinstance(module, _RoundsStream) and module.num_overflows
    }
