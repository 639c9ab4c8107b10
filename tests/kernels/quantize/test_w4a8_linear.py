"""The W4A8 layer: stored in 4 bits, multiplied as int8 codes of the same grid."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize.affine import fake_quantize
from quantwatch_kernels.quantize.packing import unpack
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerTensor, Recipe
from quantwatch_kernels.quantize.w4a8_linear import (
    LARGEST_STEP,
    W4A8_LINEAR,
    ProgressiveWeight,
    W4A8Linear,
    progressive_weight,
)
from quantwatch_kernels.registry import fallbacks

RMSE = {torch.float32: 5e-7, torch.bfloat16: 3.4e-3, torch.float16: 4.2e-4}


def grid(made: ProgressiveWeight) -> Tensor:
    """What the 4-bit codes, steps and scales say, in float64."""
    assert made.steps is not None
    steps = made.steps.double().repeat_interleave(made.group_size, 1)[:, : made.codes.shape[1]]
    return made.codes.double() * steps * made.scales.double()


def layer(backend: str, rows: int = 37, columns: int = 91, fmt: str = "int8") -> W4A8Linear:
    torch.manual_seed(7)
    weight = progressive_weight(torch.randn(rows, columns), 32)
    return W4A8Linear(
        weight, nn.Parameter(torch.randn(rows)), ActivationSpec(INT_FORMATS[fmt]), backend
    )


@pytest.mark.parametrize("dtype", RMSE, ids=str)
@pytest.mark.parametrize("fmt", ["int8", "uint8"])
@pytest.mark.parametrize("backend", ["aten", "dequantized", "reference"])
def test_forward(backend: str, fmt: str, dtype: torch.dtype) -> None:
    """Catches int8 codes of another grid than the stored one, and a short last group."""
    torch.manual_seed(7)
    weight = progressive_weight(torch.randn(37, 91), 32)
    made = layer(backend, fmt=fmt)
    x = torch.randn(2, 3, 91).to(dtype)
    rows = made.quantize_input(x)
    zeros = 0 if rows.zeros is None else rows.zeros.double()
    values = (rows.codes.double() - zeros) * rows.scales.double()
    assert made.bias is not None
    expected = values @ grid(weight).T + made.bias.detach().double()
    y = made(x)
    assert y.dtype == dtype
    assert relative_rmse(y.view(6, 37), expected) <= RMSE[dtype]
    assert not fallbacks()


def test_is_stored_in_4_bits() -> None:
    """Catches a layer that keeps its int8 codes in the checkpoint."""
    made = layer("aten")
    made(torch.randn(2, 91))
    state = made.state_dict()
    assert sorted(state) == ["bias", "scales", "steps", "weight_packed"]
    assert state["weight_packed"].shape == (37, 46)
    twin = layer("reference")
    twin.load_state_dict(state)
    assert torch.equal(twin.quantized().codes, made.quantized().codes)
    assert torch.equal(
        unpack(state["weight_packed"], INT_FORMATS["int4"], 91),
        progressive_weight(torch.randn(37, 91, generator=torch.manual_seed(7)), 32).codes,
    )


@given(st.integers(1, 4), st.integers(1, 70), st.integers(2, 40), st.integers(0, 99))
@settings(max_examples=60)
def test_laws(rows: int, columns: int, group: int, seed: int) -> None:
    """Codes, steps and products stay in range; a value is off by half a step, or clipped."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    made = progressive_weight(weight, group)
    expanded = made.expanded()
    assert int(made.codes.abs().max()) <= 7
    assert made.steps is not None
    assert 1 <= int(made.steps.min()) <= int(made.steps.max()) <= LARGEST_STEP
    assert torch.equal(expanded.codes.double() * made.scales.double(), grid(made))
    steps = made.steps.double().repeat_interleave(group, 1)[:, :columns] * made.scales.double()
    off = (weight.double() - grid(made)).abs()
    clipped = made.codes.abs() == 7
    assert bool(((off <= steps / 2 * (1 + 1e-6)) | clipped).all())


@pytest.mark.parametrize(("columns", "group"), [(84, 64), (20, 64), (65, 16), (64, 32)])
def test_the_better_step_is_taken(columns: int, group: int) -> None:
    """Catches a short last group judged on repetitions of its last column."""
    weight = torch.randn(256, columns, generator=torch.Generator().manual_seed(1))
    made = progressive_weight(weight, group)
    values = grid(made)
    scales = made.scales.double()
    for start in range(0, columns, group):
        part = weight[:, start : start + group].double()
        # In float32 as there: a quotient that is a whole number is its own floor and ceiling.
        wanted = part.float().abs().amax(1, keepdim=True) / 7 / made.scales
        costs = []
        for step in (wanted.floor(), wanted.ceil()):
            size = step.clamp(1, LARGEST_STEP) * scales
            codes = (part / size).round().clamp(-7, 7)
            costs.append((part - codes * size).square().sum(1))
        found = (part - values[:, start : start + group]).square().sum(1)
        assert (found <= torch.minimum(*costs) * (1 + 1e-4) + 1e-12).all()


def test_error_is_close_to_free_group_scales() -> None:
    """Catches steps that are rounded the wrong way: at most 15 % above plain int4 in groups."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    weight *= torch.rand(64, 8, generator=torch.Generator().manual_seed(2)).repeat_interleave(64, 1)
    plain = relative_rmse(fake_quantize(weight, Recipe.named("int4-g64").weights), weight)
    progressive = relative_rmse(grid(progressive_weight(weight, 64)), weight)
    print(f"plain {plain:.4f}, progressive {progressive:.4f}")
    assert progressive <= 1.15 * plain


def test_odd_weights() -> None:
    """Catches zeros that become NaN (bug log 3), and a NaN that becomes a number."""
    weight = torch.randn(4, 64)
    weight[0] = 0.0
    weight[1, :32] = 0.0
    weight[2, 3] = torch.nan
    made = progressive_weight(weight, 32)
    values = made.expanded().values
    assert not values[0].any()
    assert not values[1, :32].any()
    assert values[2].isnan().all()
    assert made.scales[[0, 1, 3]].isfinite().all()
    y = W4A8Linear(made, None)(torch.randn(3, 64))
    assert y.isnan().any(0).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("weight", "group", "message"),
    [
        (torch.zeros(3), 32, "float matrix"),
        (torch.zeros(3, 4, dtype=torch.int8), 32, "float matrix"),
        (torch.zeros(3, 0), 32, "column"),
        (torch.zeros(3, 4), 1, "group size"),
    ],
)
def test_refuses_bad_weights(weight: Tensor, group: int, message: str) -> None:
    """Catches an empty or integer weight."""
    with pytest.raises(ValueError, match=message):
        progressive_weight(weight, group)


def test_refuses_other_activations() -> None:
    """Catches scales of the whole batch."""
    with pytest.raises(ValueError, match="w4a8_linear: activations"):
        W4A8Linear(
            progressive_weight(torch.randn(3, 4), 2), None, ActivationSpec(INT8, PerTensor())
        )


def test_counts_under_its_own_name() -> None:
    """Catches fallbacks that are booked on W8A8."""
    made = layer("triton")
    made.backend = "triton"
    assert W4A8_LINEAR.backends == ("aten", "dequantized", "reference", "triton")
    made(torch.randn(2, 91).double())
    assert [each.op for each in fallbacks()] == ["w4a8_linear"]
