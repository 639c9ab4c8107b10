"""Move a scale per channel from one module into the one before it; the function stays the same.

x / s into a norm's gain (w, or 1 + w as in Gemma) or a linear layer's rows, W · s into the columns
of every reader. Products are float64, rounded once to the parameter's dtype.
"""

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.blocks import norm_gain

__all__ = ["divide_outputs", "is_linear", "multiply_inputs"]


def is_linear(module: nn.Module) -> bool:
    """Whether the module multiplies by a float matrix: nn.Linear or GPT-2's Conv1D."""
    kind = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return kind and module.get_parameter("weight").is_floating_point()


def multiply_inputs(linear: nn.Module, factors: Tensor) -> None:
    """Multiply the columns [K] of a linear layer's weight."""
    weight = linear.get_parameter("weight")
    per_column = factors if type(linear).__name__ != "Conv1D" else factors[:, None]
    with torch.no_grad():
        weight.copy_(weight.double() * per_column.double())


def divide_outputs(module: nn.Module, factors: Tensor) -> None:
    """Divide the output channels of a norm or a linear layer, its bias included.

    Raises ValueError for a module whose gain doesn't scale its output.
    """
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    factors = factors.double()
    with torch.no_grad():
        if is_linear(module):
            per_row = factors if type(module).__name__ == "Conv1D" else factors[:, None]
            weight.copy_(weight.double() / per_row)
        else:
            gain = norm_gain(module)
            if gain is None:
                raise ValueError(f"{type(module).__name__} scales neither by w nor by 1 + w.")
            weight.copy_((weight.double() + gain.offset) / factors - gain.offset)
        if bias is not None:
            bias.copy_(bias.double() / factors)
