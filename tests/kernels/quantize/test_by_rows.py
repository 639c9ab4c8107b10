"""Weight-only layers on many rows: what is counted, and how far two batch sizes are apart."""

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize import int4_linear, int8_linear
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.api import linear_op
from quantwatch_kernels.quantize.by_rows import row_difference_bound
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.registry import fallbacks, prefer, slow_calls

FAST_ROWS = {
    "int4-g64": int4_linear.FAST_ROWS,
    "uint4-g64": int4_linear.FAST_ROWS,
    "int8-channel": int8_linear.FAST_ROWS,
}


def layer(recipe: str, backend: str | None) -> PackedLinear:
    torch.manual_seed(5)
    spec = Recipe.named(recipe).weights
    return PackedLinear(
        quantize_weight(torch.randn(96, 576) + 0.3, spec), None, linear_op(spec), backend
    )


def inputs(rows: int = 64) -> Tensor:
    return torch.randn(rows, 576, generator=torch.Generator().manual_seed(6)).bfloat16()


@pytest.mark.parametrize("recipe", FAST_ROWS)
def test_few_rows_are_native(recipe: str) -> None:
    """Catches a threshold that is off by one, and another kernel where the native one is faster."""
    x = inputs(FAST_ROWS[recipe])
    assert torch.equal(layer(recipe, "by_rows")(x), layer(recipe, "aten")(x))
    assert not slow_calls()


@pytest.mark.parametrize("recipe", FAST_ROWS)
def test_many_rows_are_a_bfloat16_product(recipe: str) -> None:
    """Catches other values than the native kernel's: the same rows, within the stated bound."""
    made, x = layer(recipe, "by_rows"), inputs()
    many, few = made(x), torch.cat([made(part) for part in torch.split(x, 8)])
    assert not torch.equal(many, few)
    bound = row_difference_bound(x, made.quantized().values, few)
    assert bool(((many.double() - few.double()).abs() <= bound).all())
    error = relative_rmse(many, few)
    print(f"{recipe}: two batch sizes differ by {error:.1e}")
    assert error <= 4e-3
    assert not slow_calls()
    assert not fallbacks()


@pytest.mark.parametrize("recipe", FAST_ROWS)
def test_a_slow_call_is_counted(recipe: str) -> None:
    """Catches a layer that is slower than bfloat16 without a word."""
    made = layer(recipe, "aten")
    for _ in range(2):
        made(inputs(FAST_ROWS[recipe] + 1))
    made(inputs(FAST_ROWS[recipe]))
    [(slow, count)] = slow_calls().items()
    assert (slow.op, slow.backend, count) == (linear_op(made.spec).name, "aten", 2)


def test_preferred_by_name() -> None:
    """Catches a layer that keeps one native layout only, and takes it for the other one."""
    made, x = layer("int4-g64", None), inputs()
    native = made(x)
    with prefer("by_rows"):
        fast = made(x)
    assert torch.equal(made(x), native)
    assert torch.equal(fast, layer("int4-g64", "by_rows")(x))


@pytest.mark.parametrize("backend", ["aten", "by_rows"])
def test_shapes_it_cannot_do_fall_back(backend: str) -> None:
    """Catches a bfloat16 path that skips the native kernel's predicate."""
    spec = Recipe.named("int4-g128").weights
    made = PackedLinear(quantize_weight(torch.randn(32, 576), spec), None, linear_op(spec), backend)
    assert made(inputs()).shape == (64, 32)
    assert [each.used for each in fallbacks()] == ["dequantized"]
