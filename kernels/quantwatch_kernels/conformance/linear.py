"""Inputs and twins of the linear operators with packed weights.

The twin multiplies in float64 what the codes stand for, taken from before they were packed. Each
kind of weights has two cases:

- drawn: normal inputs and weights. Errors are measured against Σ|x|·r + |bias|, r the largest
  weight that a group's grid can hold; the tolerance is twice the largest error measured.
- exact sums: inputs in eighths and scales that are powers of two, so that every product and sum is
  exact in float32 and every input and scale in bfloat16. What is left is one rounding of the
  result, relative to the result: a single term too many or too few can't hide in it.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Generator, Tensor, nn

from quantwatch_kernels.conformance.case import LAYOUTS, Ask, Made, OpCase
from quantwatch_kernels.quantize.affine import QuantizedWeight, quantize_weight
from quantwatch_kernels.quantize.packed_linear import LinearOp, PackedLinear
from quantwatch_kernels.quantize.qparams import QParams, spread
from quantwatch_kernels.quantize.recipe import PerTensor, Recipe, WeightSpec

__all__ = ["LINEAR_SHAPES", "drawn_weight", "linear_cases", "right_product"]

LINEAR_SHAPES = (
    (1, 64, 576),
    (7, 100, 96),
    (3, 16, 1536),
    (5, 33, 1041),
    (17, 17, 65),
    (2, 1, 3),
    (0, 16, 64),
)
"""(rows, outputs, inputs): one row, odd everything, no row, a size of SmolLM2."""

_IN_BFLOAT16 = ("aten", "by_rows")
"""Native back ends that round inputs and scales to bfloat16."""
_NATIVE = 1.4e-3
_DRAWN = {torch.float32: 1.8e-7, torch.bfloat16: 2.8e-3, torch.float16: 3.2e-4}


def linear_cases(op: LinearOp, name: str, *, float_zero: bool = False) -> tuple[OpCase, OpCase]:
    """Return both cases of a plain recipe's weights (`Recipe.named`)."""
    spec = Recipe.named(name).weights
    if float_zero:
        spec = replace(spec, zero="float")
        name = f"{name}, float zero"
    return (
        OpCase(op, name, partial(_drawn, op, spec), _drawn_tolerance, LINEAR_SHAPES),
        OpCase(op, f"{name}, exact sums", partial(_exact, op, spec), _one_rounding, LINEAR_SHAPES),
    )


def _drawn_tolerance(backend: str, dtype: torch.dtype) -> float:
    return max(_NATIVE, _DRAWN[dtype]) if backend in _IN_BFLOAT16 else _DRAWN[dtype]


def _one_rounding(backend: str, dtype: torch.dtype) -> float:
    return torch.finfo(torch.bfloat16 if backend in _IN_BFLOAT16 else dtype).eps / 2


def _drawn(op: LinearOp, spec: WeightSpec, ask: Ask) -> Made:
    """Make normal inputs; a bias where the number of inputs is odd."""
    rows, outputs, inputs = ask.shape
    x = ask.randn(rows, inputs, seed=1)
    weight = drawn_weight(spec, outputs, inputs)
    bias = torch.linspace(-1, 1, outputs).to(ask.dtype) if inputs % 2 else None
    value, scale = right_product(x, weight, bias)
    parameter = None if bias is None else nn.Parameter(bias, requires_grad=False)
    module = PackedLinear(weight, parameter, op).to(ask.device)
    return Made((x, module, module.bias), (value,), (scale,))


def _exact(op: LinearOp, spec: WeightSpec, ask: Ask) -> Made:
    rows, outputs, inputs = ask.shape
    generator = Generator().manual_seed(3)
    eighths = torch.randint(-8, 9, (rows, inputs), generator=generator) / 8
    x = LAYOUTS[ask.layout](eighths.to(ask.device, ask.dtype))
    weight = _exact_weight(spec, outputs, inputs)
    value, _ = right_product(x, weight, None)
    module = PackedLinear(weight, None, op).to(ask.device)
    return Made((x, module, None), (value,), (value.abs(),))


def drawn_weight(spec: WeightSpec, outputs: int, inputs: int) -> QuantizedWeight:
    """Return a seeded quantized weight with an offset, one constant row and one of zeros."""
    generator = Generator().manual_seed(2)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.05 + 0.01
    weight[outputs // 2] = 0.03
    weight[outputs // 3] = 0.0
    return quantize_weight(weight, spec)


def _exact_weight(spec: WeightSpec, outputs: int, inputs: int) -> QuantizedWeight:
    """Return random codes of the format with scales 2⁻⁷ … 2⁻⁴ and zeros in halves or whole."""
    fmt = spec.format
    generator = Generator().manual_seed(4)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    groups = -(-inputs // spec.granularity.group_size(inputs))
    scales = 2.0 ** draw(-7, -4, outputs, groups)
    if isinstance(spec.granularity, PerTensor):
        scales = scales[:1].expand_as(scales).clone()
    zeros = None
    if spec.zero == "integer":
        zeros = draw(0, fmt.qmax, *scales.shape).to(torch.uint8)
    elif spec.zero == "float":
        zeros = draw(0, 2 * fmt.qmax, *scales.shape) / 2
    codes = draw(fmt.qmin, fmt.qmax, outputs, inputs).to(fmt.storage)
    return QuantizedWeight(codes, QParams(scales, zeros), spec)


def right_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the float64 product with a quantized weight and the scale of its errors, [M, N]."""
    fmt, params, columns = weight.spec.format, weight.qparams, weight.codes.shape[1]
    size = weight.spec.granularity.group_size(columns)
    scales = spread(params.scales, size, columns).double()
    zeros = torch.zeros_like(scales)
    if params.zeros is not None:
        zeros = spread(params.zeros, size, columns).double()
    values = (weight.codes.double() - zeros) * scales
    reach = torch.maximum((fmt.qmax - zeros).abs(), (fmt.qmin - zeros).abs()) * scales
    inputs = x.double().cpu()
    value, scale = inputs @ values.T, inputs.abs() @ reach.T
    if bias is not None:
        value, scale = value + bias.double(), scale + bias.double().abs()
    return value.to(x.device), scale.to(x.device)
