"""Linear layer with int8 weights per channel and int8 activations per token, scaled as they come.

y = (Σₖ a·w − zero·Σₖ w) · s_row · s_channel + bias, a and w the codes. The sums are exact int32:
float32 is not from K = 1041 on (127·127·K > 2²⁴, bug log 15). The zero term exists with asymmetric
activations only. The rest is float32, rounded to the input's dtype once. A row's result depends on
nothing but the row, so it is bit-equal in every batch; that is why `quantized::linear_dynamic`,
which scales the whole batch by its largest value, is not used.

`aten` is `torch._int_mm` between `rows.cpp` (or, counted, torch operators that do the same).
One weight layout isn't the best for all shapes: see `CACHED_WEIGHTS`. `dequantized` multiplies the
quantized values in float32, `reference` in float64, `triton` is the kernel for GPUs.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT8
from quantwatch_kernels.quantize import native_rows
from quantwatch_kernels.quantize.activations import integer_linear
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerChannel, WeightSpec
from quantwatch_kernels.quantize.row_codes import (
    SYMMETRIC_ROWS,
    RowCodes,
    quantize_rows,
    row_values,
)
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.registry import Fallback, Op, record_fallback

__all__ = [
    "CACHED_WEIGHTS",
    "W8A8_BACKENDS",
    "W8A8_LINEAR",
    "W8A8Linear",
    "int_mm_why_not",
    "w8a8_why_not",
]

CACHED_WEIGHTS = 2**20
"""`_int_mm` takes the weight as the view [N, K].T or as a copy [K, N]. For one row the view is
faster (up to 2.9 ×); for more rows too, or equal, as long as the weight fits a core's cache; beyond
that the copy is (1.2 to 4.5 × for 2048 × 2048 and 1024 × 4096). Measured on Zen 4, one thread."""
_MAX_SUM = 2**31 - 1


class W8A8Linear(PackedLinear):
    """A packed int8 weight whose inputs are quantized, too.

    Raises ValueError for weights or activations that are not of this kind.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: nn.Parameter | None,
        activations: ActivationSpec | None = None,
        backend: str | None = None,
    ) -> None:
        """Pack a weight [out, in]; `activations` None is symmetric int8 per token."""
        activations = SYMMETRIC_ROWS if activations is None else activations
        if reason := w8a8_why_not(weight.codes.shape[1], weight.spec, activations):
            raise ValueError(f"w8a8_linear: {reason}.")
        super().__init__(weight, bias, W8A8_LINEAR, backend)  # type: ignore[arg-type]
        self.activations = activations

    def quantize_input(self, x: Tensor) -> RowCodes:
        """Return the codes of activations [.., in] as a matrix."""
        return quantize_rows(self.flat(x), self.activations)

    def flat(self, x: Tensor) -> Tensor:
        """Return activations [.., in] as a matrix. Raises ValueError for another width."""
        if not x.ndim or x.shape[-1] != self.in_features:
            raise ValueError(
                f"w8a8_linear: inputs must have {self.in_features} features; "
                f"they are {list(x.shape)}."
            )
        return x.reshape(x.shape[:-1].numel(), self.in_features)


W8A8_LINEAR: Op[[Tensor, W8A8Linear, Tensor | None], Tensor] = Op("w8a8_linear")
"""(input [.., in], weight, bias) → [.., out] in the input's dtype."""
_Run = Callable[[Tensor, W8A8Linear, Tensor | None], Tensor]
_WhyNot = Callable[[Tensor, W8A8Linear, Tensor | None], str | None]


def w8a8_why_not(columns: int, weights: WeightSpec, activations: ActivationSpec) -> str | None:
    """Say why this operator can't multiply such weights and activations, None when it can."""
    if weights.format != INT8 or weights.granularity.group_size(columns) < columns:
        return f"weights must be int8 with a scale per channel, not {weights.to_json()}"
    if activations.format.bits != 8 or activations.static:
        return f"activations must be dynamic in 8 bits, not {activations.to_json()}"
    if not isinstance(activations.granularity, PerChannel):
        return "activations must have a scale per token, so that no row depends on another"
    # The zero term included: an asymmetric code less its zero reaches 255.
    most = _MAX_SUM // ((128 if activations.format.symmetric else 255) * 127)
    if not 0 < columns <= most:
        return f"in_features must be 1 … {most}, beyond which int32 overflows; it is {columns}"
    return None


def _products(codes: Tensor, weight: Tensor) -> Tensor:
    """Multiply int8 codes [M, K] and [K, N] to exact int32 [M, N].

    With K = 1 both have strides (1, 1), which `_int_mm` misreads: it returns stray memory.
    """
    if len(weight) == 1:
        return codes.int() * weight.int()
    return torch._int_mm(codes, weight)


@functools.cache
def int_mm_why_not() -> str | None:
    """Say whether `torch._int_mm` multiplies wrongly on this CPU (bug log 16), None if it doesn't.

    Without VNNI some builds add pairs of products in 16 bits, which saturate: hence the extremes.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (33, 1041), generator=generator, dtype=torch.int8)
    weight[0], weight[1], weight[2, ::2] = 127, -127, 127
    for rows in (1, 5, 32):
        codes = torch.randint(-128, 128, (rows, 1041), generator=generator, dtype=torch.int8)
        codes[0] = 127
        codes[-1, :900] = -128
        exact = codes.long() @ weight.long().T
        for laid_out in (weight.T, weight.T.contiguous()):
            if not torch.equal(torch._int_mm(codes, laid_out).long(), exact):
                return "torch._int_mm is not exact on this CPU"
    return None


def _why_not(x: Tensor, weight: W8A8Linear, bias: Tensor | None) -> str | None:
    del weight, bias
    if x.device.type != "cpu":
        return f"this int8 kernel runs on CPU only, not {x.device.type}"
    return int_mm_why_not()


def _native(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """Return the codes [K, N] as a view and as the fastest for many rows, scales, Σₖ codes [N]."""
    view = weight.codes.T
    many = view if view.numel() <= CACHED_WEIGHTS else view.contiguous()
    sums = view.sum(0, dtype=torch.int32)
    scales = weight.qparams.scales[:, :1].float().flatten().contiguous()
    return view, many, scales, sums


def _aten(x: Tensor, weight: W8A8Linear, bias: Tensor | None) -> Tensor:
    view, many, scales, sums = weight.native(_native)
    reason = native_rows.why_not()
    if reason is not None:
        record_fallback(Fallback("w8a8_linear rows", "rows.cpp", "torch", reason))
    plain = reason is None and weight.activations == SYMMETRIC_ROWS
    flat = weight.flat(x)
    rows = native_rows.quantize_rows_native(flat) if plain else weight.quantize_input(flat)
    products = _products(rows.codes, view if len(flat) == 1 else many)
    if rows.zeros is not None:
        products = products - rows.zeros * sums
    rescale = native_rows.rescale_rows_native if reason is None else _rescale_rows
    y = rescale(products, rows.scales, scales, bias, x.dtype)
    return _shaped(y, x, weight)


def _rescale_rows(
    sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y = sums.float().mul_(scales).mul_(row_scales)
    return (y if bias is None else y.add_(bias)).to(dtype)


def _triton_why_not(x: Tensor, weight: W8A8Linear, bias: Tensor | None) -> str | None:
    del weight, bias
    if x.dtype == torch.float64:
        return "the Triton kernels scale in float32, not float64"
    return triton_why_not(x, bfloat16=x.dtype == torch.bfloat16)


def _dequantized(x: Tensor, weight: W8A8Linear, bias: Tensor | None) -> Tensor:
    product = row_values(weight.quantize_input(x)) @ weight.quantized().values.T
    return _shaped(product if bias is None else product + bias, x, weight)


def _reference(x: Tensor, weight: W8A8Linear, bias: Tensor | None) -> Tensor:
    product = integer_linear(weight.flat(x), weight.activations, weight.quantized(), bias)
    return _shaped(product, x, weight)


def _triton(x: Tensor, weight: W8A8Linear, bias: Tensor | None) -> Tensor:
    from quantwatch_kernels.quantize.triton.int8_matmul import Int8Weight, int8_matmul_triton
    from quantwatch_kernels.quantize.triton.rows import quantize_rows_triton

    view, _, scales, sums = weight.native(_native)
    flat = weight.flat(x)
    plain = weight.activations == SYMMETRIC_ROWS
    rows = quantize_rows_triton(flat) if plain else weight.quantize_input(flat)
    packed = Int8Weight(view.T, scales, sums, bias)
    return _shaped(int8_matmul_triton(rows, packed, x.dtype), x, weight)


def _shaped(product: Tensor, x: Tensor, weight: W8A8Linear) -> Tensor:
    return product.to(x.dtype).view(*x.shape[:-1], weight.out_features)


W8A8_BACKENDS: dict[str, tuple[_Run, _WhyNot | None]] = {
    "aten": (_aten, _why_not),
    "dequantized": (_dequantized, None),
    "reference": (_reference, None),
    "triton": (_triton, _triton_why_not),
}
"""What multiplies by int8 codes, and why it can't; shared with W4A8."""
for _name, (_backend, _reason) in W8A8_BACKENDS.items():
    W8A8_LINEAR.register(_name, _reason)(_backend)
