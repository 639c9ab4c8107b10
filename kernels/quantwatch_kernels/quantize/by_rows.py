"""Weight-only layers for few and for many rows: the native kernel, or a bfloat16 product.

Native int4 and int8 kernels unpack the weight again for every block of rows, so from some number of
rows on (`FAST_ROWS` of the operator, measured) they are slower than `F.linear` in bfloat16. What is
right then depends on what is wanted, so both exist and neither is silent:

- `aten` computes every batch natively. A row's result doesn't depend on the batch, bit for bit;
  a call with too many rows is counted in `slow_calls`.
- `by_rows` multiplies in bfloat16 above `FAST_ROWS`, with values made once and kept: unquantized
  speed but for the call around it, and unquantized memory. The values are those of the native
  kernel rounded to bfloat16, and the results of two batch sizes differ by at most
  2⁻⁸ · (|y| + Σₖ |xₖ·wₖ|): both round the result (2⁻⁹ each), one the weight (2⁻⁹), and both sum in
  float32 (far below). A monitor that compares batches sees that: about 2e-3 of a row's norm.

The default is `aten`: the monitor's own figures must not depend on how it batches.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.packed_linear import LinearOp, PackedLinear
from quantwatch_kernels.registry import Slow, record_slow

__all__ = ["count_if_slow", "register_by_rows", "row_difference_bound"]

_Linear = Callable[[Tensor, PackedLinear, Tensor | None], Tensor]
_WhyNot = Callable[[Tensor, PackedLinear, Tensor | None], str | None]


def count_if_slow(op: str, x: Tensor, fast_rows: int) -> None:
    """Count a native call on inputs [.., in] with more rows than the kernel is fast for."""
    if x.shape[:-1].numel() > fast_rows:
        reason = f"more than {fast_rows} rows are slower than bfloat16 F.linear (see by_rows)"
        record_slow(Slow(op, "aten", reason))


def register_by_rows(
    op: LinearOp,
    native: _Linear,
    why_not: _WhyNot,
    values: Callable[[QuantizedWeight], tuple[Tensor, ...]],
    fast_rows: int,
) -> None:
    """Register `by_rows`; `values` makes (bfloat16 [out, in],), what `native` multiplies with."""

    def run(x: Tensor, weight: PackedLinear, bias: Tensor | None) -> Tensor:
        if x.shape[:-1].numel() <= fast_rows:
            return native(x, weight, bias)
        (dequantized,) = weight.native(values)
        y = nn.functional.linear(x.to(torch.bfloat16), dequantized)
        return (y if bias is None else y + bias).to(x.dtype)

    op.register("by_rows", why_not)(run)


def row_difference_bound(x: Tensor, values: Tensor, y: Tensor) -> Tensor:
    """Return how far results [M, N] of two batch sizes may be apart, float64 (see above)."""
    products = x.double().abs() @ values.double().abs().T
    accumulated = values.shape[1] * torch.finfo(torch.float32).eps * products
    return 2.0**-8 * (y.double().abs() + products) + 2 * accumulated
