"""The dtype of the residual stream that leaves a layer: float32, bfloat16 or float16.

Narrower than the model computes: rounded and widened again. Wider: the layer's sums are made in
that dtype (its input is widened), norms hand their result on in the dtype of the weights, and
layers that aren't named round their output back. Values beyond float16's 65504 become infinite,
stay infinite and are counted (`residual_overflows`).
"""

import fnmatch
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.blocks import norm_children
from quantwatch_kernels.quantize.decoder_layers import find_decoder_layers
from quantwatch_kernels.quantize.high_precision import KEEPS_STATISTICS
from quantwatch_kernels.quantize.interpose import interpose

__all__ = ["overflows_uncounted", "residual_overflows", "round_residual_"]

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
        taken = self.stream_dtype if self.widens else self.compute_dtype
        hidden_states = self._counted(hidden_states, hidden_states.to(taken))
        output = super().forward(hidden_states, *args, **kwargs)
        if isinstance(output, tuple):
            return (self._round(output[0]), *output[1:])
        return self._round(output)

    def _round(self, hidden: Tensor) -> Tensor:
        rounded = hidden.to(self.stream_dtype)
        return self._counted(hidden, rounded if self.widens else rounded.to(self.compute_dtype))

    def _counted(self, before: Tensor, after: Tensor) -> Tensor:
        # Of what is handed on: 65504 is 65536 in bfloat16, which float16 can't hold any more.
        if after is not before:
            self.num_overflows += int((torch.isinf(after) & torch.isfinite(before)).sum())
        return after


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
    packed: Mapping[str, torch.dtype] | None = None,
) -> Notes:
    """Round what leaves each layer to the dtype of the first glob that matches it.

    A glob is compared with the layer's scope, its path and its number. `packed` maps paths of
    packed matrices to the dtype they had: the layer computes in it. Returns (name, what was done).
    Raises ValueError for another dtype and for a glob that matches no layer.
    """
    for glob, dtype in dtypes:
        if dtype not in _DTYPES:
            allowed = "float32, bfloat16 or float16"
            raise ValueError(f"residual_dtype {glob!r} is {allowed}; it is {dtype}.")
    notes: Notes = []
    used: set[str] = set()
    layers = find_decoder_layers(model)
    computes = {path: _compute_dtype(path, layer, packed or {}) for path, layer in layers}
    for path, layer in layers:
        name = (scopes or {}).get(path, path)
        aliases = {name, path, path.rpartition(".")[2]}
        matching = [(g, d) for g, d in dtypes if any(fnmatch.fnmatchcase(a, g) for a in aliases)]
        used |= {glob for glob, _ in matching}
        if matching:
            _round_layer(layer, matching[0][1], computes[path])
            notes.append((name, f"its output is rounded to {str(matching[0][1])[6:]}"))
    for glob, _ in dtypes:
        if glob not in used:
            raise ValueError(f"residual_dtype {glob!r} matches none of {len(layers)} layers.")
    if any(isinstance(layer, _RoundsStream) and layer.widens for _, layer in layers):
        for path, layer in layers:
            if not isinstance(layer, _RoundsStream):  # it doesn't pass a wide stream on
                _round_layer(layer, computes[path], computes[path])
        _let_norms_narrow(model, layers, computes[layers[0][0]])
    return notes


def _round_layer(layer: nn.Module, dtype: torch.dtype, compute: torch.dtype) -> None:
    interpose(layer, _RoundsStream)
    layer.stream_dtype, layer.compute_dtype = dtype, compute  # type: ignore[assignment]
    layer.num_overflows = 0  # type: ignore[assignment]


def _compute_dtype(path: str, layer: nn.Module, packed: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the dtype that a layer's matrices have or had; that of its norms if nobody knows.

    Not of routers: they were made float32 whatever the layer computes in.
    """
    known = [dtype for matrix, dtype in packed.items() if matrix.startswith(f"{path}.")]
    if known:
        return known[0]
    found = [
        parameter
        for module in layer.modules()
        if not isinstance(module, KEEPS_STATISTICS)
        for parameter in module.parameters(recurse=False)
        if parameter.is_floating_point()
    ]
    found.sort(key=lambda parameter: parameter.ndim < 2)
    return found[0].dtype if found else torch.get_default_dtype()


def _let_norms_narrow(
    model: nn.Module, layers: list[tuple[str, nn.Module]], compute: torch.dtype
) -> None:
    """Let the norms of the layers and behind them take a wider stream than they hand on."""
    decoder = model.get_submodule(layers[0][0].rpartition(".")[0].rpartition(".")[0])
    for module in (decoder, *(layer for _, layer in layers)):
        for _, norm in norm_children(module):
            interpose(norm, _HandsOnComputeDtype)
            norm.compute_dtype = compute  # type: ignore[assignment]


def residual_overflows(model: nn.Module) -> dict[str, int]:
    """Return path → number of values that a narrow residual stream made infinite, where any."""
    return {
        path: module.num_overflows
        for path, module in model.named_modules()
        if isinstance(module, _RoundsStream) and module.num_overflows
    }


@contextmanager
def overflows_uncounted(model: nn.Module) -> Iterator[None]:
    """Inside, run a module as an experiment: its overflows are not counted."""
    found = [module for module in model.modules() if isinstance(module, _RoundsStream)]
    before = [module.num_overflows for module in found]
    try:
        yield
    finally:
        for module, count in zip(found, before, strict=True):
            module.num_overflows = count
