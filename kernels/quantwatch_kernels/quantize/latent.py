"""What is learned in place of one quantized matrix: its weights, its scales, or both.

A matrix starts from codes, scales and zeros that some method chose (nearest, GPTQ, …) and starts
with exactly those: values of the first step equal the quantizer's bit for bit.

- weights: float32 [N, K], scales fixed. They start at the unrounded weight wherever that rounds to
  the code it was given, and else in that code's cell, a quarter step from its centre towards it.
- scales: codes fixed, s = s₀·exp(θ), z = z₀ + qmax·φ, θ = φ = 0 at the start. A scale stays
  positive, and one learning rate, a share of scale and range, suits groups of any size.
- both: weights, and scales (float zeros) by the gradients of `fake_quant`: learned ranges.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight, quantize
from quantwatch_kernels.quantize.calibrate import quantize_layers
from quantwatch_kernels.quantize.fake_quant import fake_quantize, scaled_codes, stored_qparams
from quantwatch_kernels.quantize.qparams import spread
from quantwatch_kernels.quantize.recipe import PerTensor
from quantwatch_kernels.quantize.selection import Layer

__all__ = ["Latent", "Learn", "Start", "inside_cells", "quantize_to_start"]

Learn = Literal["weights", "scales", "both"]
_REACH = 0.25
"""How far from its cell's centre a moved weight starts, in steps.

At the cell's edge (0.5) the first steps of training would flip what GPTQ decided, half of it at
random: in 24 steps a tiny model ends at 2.2 times its GPTQ loss from 0.49, at 0.6 times from 0.25.
"""


@dataclass(frozen=True, slots=True)
class Start:
    """A layer, how it was quantized, and the weight [N, K] before that."""

    layer: Layer
    quantized: QuantizedWeight
    unrounded: Tensor


def quantize_to_start(
    model: nn.Module, layers: Sequence[Layer], inputs: Sequence[Tensor]
) -> list[Start]:
    """Quantize `layers` in place as their specs say and keep what they were.

    Raises ValueError as `quantize_layers` does.
    """
    kept: Mapping[str, Tensor] = {layer.key: layer.weight.clone() for layer in layers}
    return [
        Start(layer, quantized, kept[layer.key])
        for layer, quantized, _ in quantize_layers(model, layers, inputs)
    ]


def inside_cells(weight_NK: Tensor, quantized: QuantizedWeight) -> Tensor:
    """Return float32 weights that round to the given codes: `weight_NK` itself where it does.

    Elsewhere the point of the inner half of the code's cell that is nearest to it.
    """
    spec, qparams, columns = quantized.spec, quantized.qparams, weight_NK.shape[1]
    size = spec.granularity.group_size(columns)
    weight, codes = weight_NK.float(), quantized.codes.float()
    scales = spread(qparams.scales, size, columns)
    zeros = 0.0 if qparams.zeros is None else spread(qparams.zeros, size, columns)
    steps = (weight / scales).clamp(codes - zeros - _REACH, codes - zeros + _REACH)
    fits = quantize(weight, qparams, spec) == quantized.codes
    return torch.where(fits, weight, steps * scales)


class Latent:
    """The learned parameters of one layer. `values` are what the layer computes with."""

    def __init__(self, start: Start, learn: Learn) -> None:
        quantized = start.quantized
        scales, zeros = quantized.qparams.scales, quantized.qparams.zeros
        # Parameters that 16 bits didn't hold are float32: they are learned as such.
        self.layer, self.spec = start.layer, replace(quantized.spec, scale_dtype=scales.dtype)
        self._asked = quantized.spec
        self._scales, self._zeros = scales.float(), zeros
        self._codes = quantized.codes
        self.weight: nn.Parameter | None = None
        self.growth: nn.Parameter | None = None
        """θ [N, G], [1, 1] per tensor: log of the scales' growth."""
        self.shift: nn.Parameter | None = None
        """φ of float zeros, like θ."""
        if learn != "scales":
            self.weight = nn.Parameter(inside_cells(start.unrounded, quantized))
        if learn != "weights":
            alone = isinstance(self.spec.granularity, PerTensor)
            shape = (1, 1) if alone else scales.shape
            self.growth = nn.Parameter(torch.zeros(shape, device=scales.device))
            if zeros is not None and zeros.is_floating_point():
                self.shift = nn.Parameter(torch.zeros_like(self.growth))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what is learned: the weight first."""
        for parameter in (self.weight, self.growth, self.shift):
            if parameter is not None:
                yield parameter

    def values(self) -> Tensor:
        """Return the quantized values, float32 [N, K], differentiable."""
        scales, zeros = self._grid()
        if self.weight is None:
            return scaled_codes(self._codes, scales, zeros, self.spec)
        return fake_quantize(self.weight, scales, zeros, self.spec)

    def export(self) -> QuantizedWeight:
        """Return codes and parameters whose values are `values`, bit for bit."""
        with torch.no_grad():
            scales, zeros = self._grid()
            qparams = stored_qparams(scales, zeros, self.spec)
            codes = self._codes
            if self.weight is not None:
                codes = quantize(self.weight, qparams, self.spec)
        return QuantizedWeight(codes, qparams, self._asked)

    def row_factors(self) -> Tensor:
        """Return mean s² of each row over that of the matrix, [N, 1].

        Times these a weight's gradient step is the one of w/s, back in w: every channel then moves
        by the like share of its own steps.
        """
        squares = self._grid()[0].detach().square().mean(1, keepdim=True)
        return squares / squares.mean()

    def _grid(self) -> tuple[Tensor, Tensor | None]:
        scales, zeros = self._scales, self._zeros
        if self.growth is not None:
            scales = scales * self.growth.exp()
        if self.shift is not None and zeros is not None:
            zeros = zeros.float() + self.spec.format.qmax * self.shift
        return scales, zeros
