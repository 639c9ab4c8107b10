"""Which converted layers multiply the codes of their inputs by those of their weights.

Where each token's inputs are rounded to 8 bits as they come, weights of 8 bits with a scale per
channel go to `w8a8_linear`, weights of 4 bits to `w4a8_linear`. Such a layer rounds its input
itself. Everything else rounds its input in floats and multiplies the rounded values.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.recipe import ActivationSpec
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.w4a8_linear import W4A8_LINEAR, W4A8Linear, w4a8_why_not
from quantwatch_kernels.quantize.w8a8_linear import W8A8_LINEAR, W8A8Linear, w8a8_why_not

__all__ = ["IntegerLayer", "integer_layer"]


@dataclass(frozen=True, slots=True)
class IntegerLayer:
    """How one layer is made and counted."""

    op: str
    kind: Callable[[QuantizedWeight, nn.Parameter | None, ActivationSpec, str], W8A8Linear]
    activations: ActivationSpec

    def make(
        self, quantized: QuantizedWeight, bias: nn.Parameter | None, backend: str
    ) -> W8A8Linear:
        """Return the layer."""
        return self.kind(quantized, bias, self.activations, backend)


def integer_layer(
    layer: Layer, activations: ActivationSpec | None
) -> tuple[IntegerLayer | None, str | None]:
    """Return how a layer multiplies integers, or why it can't; neither where nobody asked."""
    if activations is None or isinstance(layer.module, nn.Embedding):
        return None, None
    if layer.expert is not None:
        return None, "stacked experts are multiplied in floats"
    if layer.weight.device.type != "cpu":
        return None, f"integers are multiplied on CPU only, not {layer.weight.device.type}"
    four = layer.spec.format.bits == 4
    check = w4a8_why_not if four else w8a8_why_not
    if reason := check(layer.weight.shape[1], layer.spec, activations):
        return None, reason
    op, kind = (W4A8_LINEAR, W4A8Linear) if four else (W8A8_LINEAR, W8A8Linear)
    return IntegerLayer(op.name, kind, activations), None
