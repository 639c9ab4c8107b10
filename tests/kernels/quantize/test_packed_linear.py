"""Packed linear layers: every back end against float64 arithmetic on the quantized values."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.api import linear_op
from quantwatch_kernels.quantize.int4_linear import int4_aten_why_not
from quantwatch_kernels.quantize.int8_linear import int8_aten_why_not
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.registry import fallbacks
from quantwatch_kernels.testing import VIEWS, assert_close


class Case(NamedTuple):
    recipe: str
    rows: int
    columns: int
    native: bool


CASES = {
    "int8-576": Case("int8-channel", 192, 576, True),
    "int8-one-row": Case("int8-channel", 1, 64, True),
    "int8-100-rows": Case("int8-channel", 100, 48, True),
    "int8-70-columns": Case("int8-channel", 64, 70, False),
    "int8-groups": Case("int8-g64", 32, 128, False),
    "int4-g64": Case("int4-g64", 192, 576, True),
    "int4-g32-tail-block": Case("int4-g32", 80, 96, True),
    "int4-short-group": Case("int4-g128", 32, 576, False),
    "int4-odd-columns": Case("int4-g32", 16, 33, False),
    "int4-100-rows": Case("int4-g64", 100, 64, False),
    "int4-channel": Case("int4-channel", 16, 576, False),
    "uint4-g64": Case("uint4-g64", 192, 576, True),
    "uint4-g16": Case("uint4-g16", 32, 64, False),
    "uint8-channel": Case("uint8-channel", 32, 64, False),
}
# Twice what the native operators reach against float64 (kernel_anchors §1.3): activations, scales
# and result are bfloat16, whatever the input is.
NATIVE_RMSE = 6e-3
FLOAT_RMSE = {torch.float32: 7e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def build(case: Case, backend: str, bias: bool = True) -> tuple[PackedLinear, Tensor]:
    torch.manual_seed(1)
    weight = torch.randn(case.rows, case.columns)
    parameter = nn.Parameter(torch.randn(case.rows)) if bias else None
    return packed(weight, parameter, case, backend), weight


def packed(weight: Tensor, bias: nn.Parameter | None, case: Case, backend: str) -> PackedLinear:
    spec = Recipe.named(case.recipe).weights
    return PackedLinear(quantize_weight(weight, spec), bias, linear_op(spec), backend)


def product(layer: PackedLinear, weight: Tensor, x: Tensor, recipe: str) -> Tensor:
    """The definition, from the float weight."""
    y = x.double() @ quantize_weight(weight, Recipe.named(recipe).weights).values.double().T
    return y if layer.bias is None else y + layer.bias.detach().double()


@pytest.mark.parametrize("dtype", FLOAT_RMSE, ids=str)
@pytest.mark.parametrize("backend", ["dequantized", "reference", "aten"])
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, backend: str, dtype: torch.dtype) -> None:
    """Catches wrong scales, groups, nibbles, and a native kernel run where it does not apply."""
    case = CASES[name]
    layer, weight = build(case, backend)
    layer.to(dtype if backend != "reference" else torch.float32)
    layer.scales = layer.scales.float()
    x = torch.randn(3, 5, case.columns).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (3, 5, case.rows)
    limit = NATIVE_RMSE if backend == "aten" and case.native else FLOAT_RMSE[dtype]
    error = relative_rmse(y, product(layer, weight, x, case.recipe))
    print(f"{name} {backend} {dtype}: relative RMSE {error:.1e}")
    assert error <= limit
    assert bool(fallbacks()) == (backend == "aten" and not case.native)


@pytest.mark.parametrize("name", CASES)
def test_predicates_tell_why(name: str) -> None:
    """Catches a silent fallback: each unsupported shape names its reason."""
    case = CASES[name]
    spec = Recipe.named(case.recipe).weights
    why_not = int8_aten_why_not if spec.format.bits == 8 else int4_aten_why_not
    reason = why_not(case.rows, case.columns, spec)
    assert (reason is None) == case.native
    assert reason is None or any(character.isdigit() for character in reason) or "group" in reason


@pytest.mark.parametrize("backend", ["dequantized", "reference", "aten"])
@pytest.mark.parametrize("name", ["int8-576", "int4-g64"])
def test_bias_is_added_once(name: str, backend: str) -> None:
    """Catches a bias added twice or dropped (bug log 13)."""
    layer, _ = build(CASES[name], backend)
    y = layer(torch.zeros(2, CASES[name].columns))
    assert layer.bias is not None
    assert torch.equal(y, layer.bias.detach().expand_as(y))
    assert [n for n, _ in layer.named_parameters()] == ["bias"]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["int8-576", "int4-g64"])
def test_layout_of_activations_does_not_matter(name: str, view: str) -> None:
    """Catches native kernels that read a strided or stride-0 input as contiguous (bug log 18)."""
    layer, _ = build(CASES[name], "aten")
    x = VIEWS[view](torch.randn(6, CASES[name].columns))
    assert torch.equal(layer(x), layer(x.clone()))


@pytest.mark.parametrize("name", ["int8-576", "int4-g64"])
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    """Catches a batch-variant native kernel: a row alone equals the row among 64."""
    layer, _ = build(CASES[name], "aten")
    x = torch.randn(64, CASES[name].columns)
    assert torch.equal(layer(x)[:1], layer(x[:1]))


@pytest.mark.parametrize("backend", ["dequantized", "reference", "aten"])
@pytest.mark.parametrize("name", ["int8-576", "int4-g64"])
def test_empty_batch(name: str, backend: str) -> None:
    """Catches a crash on zero tokens (bug log 20)."""
    layer, _ = build(CASES[name], backend)
    assert layer(torch.zeros(0, CASES[name].columns)).shape == (0, CASES[name].rows)


@pytest.mark.parametrize("backend", ["dequantized", "reference", "aten"])
@pytest.mark.parametrize("name", ["int8-576", "int4-g64"])
def test_a_nan_weight_reaches_the_output(name: str, backend: str) -> None:
    """Catches a damaged checkpoint that quantizes to a healthy layer."""
    case = CASES[name]
    weight = torch.randn(case.rows, case.columns)
    weight[3, 5] = torch.nan
    y = packed(weight, None, case, backend)(torch.randn(2, case.columns))
    assert y.isnan().any(0).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("name", ["int8-576", "int4-odd-columns"])
def test_state_is_canonical(name: str) -> None:
    """Catches an instruction set's layout that gets into a checkpoint."""
    layer, _ = build(CASES[name], "aten")
    layer(torch.randn(1, CASES[name].columns))
    state = layer.state_dict()
    assert sorted(state) == ["bias", "scales", "weight_packed"]
    # A twin of zeros: one of the same seed would be equal without loading anything.
    twin, _ = build(CASES[name], "reference", bias=True)
    twin.load_state_dict({key: torch.zeros_like(value) for key, value in state.items()})
    assert not twin.quantized().values.any()
    twin.load_state_dict(state)
    assert_close(twin.quantized().values, layer.quantized().values, rtol=0)
    assert "in_features" in repr(layer)
