"""Choosing scales and codes: exact rules first, laws after, published figures last."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.formats import INT4, INT8, INT_FORMATS, IntFormat
from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize import affine
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.hqq import hqq
from quantwatch_kernels.quantize.qparams import choose_qparams
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, Recipe, WeightSpec
from quantwatch_kernels.quantize.specs import Zero
from quantwatch_kernels.testing import VIEWS

FORMATS = {"int8": INT8, "int4": INT4}
RECIPES = ["int8-channel", "int4-channel", "int8-g64", "int4-g64", "int4-g128", "int4-g50"]


def roundtrip(weight: Tensor, fmt: IntFormat, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    quantized = quantize_weight(weight, WeightSpec(fmt, PerGroup(group_size)))
    return quantized.qparams.scales, quantized.codes, quantized.values


def fake_quantize(weight: Tensor, recipe: Recipe) -> Tensor:
    return affine.fake_quantize(weight, recipe.weights)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_definition(fmt: IntFormat) -> None:
    """Catches /7.5 or /8 under the same name, and a peak that saturates (kernel_anchors 2.4, 4)."""
    peak = float(fmt.qmax)
    weight = torch.tensor([[peak, -peak, 1.0, 0.4, -0.6, 0.0]])
    scales, codes, values = roundtrip(weight, fmt, 6)
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[fmt.qmax, fmt.qmin, 1, 0, -1, 0]]
    assert values[0, 0].item() == peak


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_halves_go_to_even(fmt: IntFormat) -> None:
    """Catches truncation and half-away-from-zero (bug log 24)."""
    weight = torch.tensor([[float(fmt.qmax), 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert roundtrip(weight, fmt, 7)[1][0, 1:].tolist() == [0, 2, 2, 0, -2, -2]


def test_last_group_may_be_short() -> None:
    """Catches groups that run on into the next row, and a refusal of 576 % 128 (bug log 1)."""
    weight = torch.randn(3, 576)
    weight[1] *= 1000
    scales, _, values = roundtrip(weight, INT4, 128)
    assert scales.shape == (3, 5)
    for row in range(3):
        for group, part in enumerate(torch.split(weight[row], 128)):
            assert scales[row, group].item() == pytest.approx(part.abs().max().item() / 7)
    assert ((values - weight).abs() <= 0.51 * scales.repeat_interleave(128, 1)[:, :576]).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_zeros_stay_zeros(fmt: IntFormat) -> None:
    """Catches 0/0 in a dead row or group (bug log 3, 5), and −0 that changes the scale (25)."""
    weight = torch.randn(3, 64)
    weight[1] = 0
    weight[2, 32:] = -0.0
    scales, _, values = roundtrip(weight, fmt, 32)
    assert (scales > 0).all()
    assert torch.isfinite(scales).all()
    assert (values[1] == 0).all()
    assert (values[2, 32:] == 0).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_a_constant_group_is_exact(fmt: IntFormat) -> None:
    """Catches a range of 0 that becomes a division by 0 or ±1 (bug log 4)."""
    weight = torch.full((2, 16), 0.37)
    scales, _, values = roundtrip(weight, fmt, 16)
    assert ((values - weight).abs() <= 1e-6 * scales).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scales_are_float32(dtype: torch.dtype) -> None:
    """Catches scale arithmetic in float16, where small groups flush and 1/s overflows (bug log 6)."""
    weight = torch.linspace(-1e-4, 1e-4, 32).to(dtype).unsqueeze(0)
    scales, _, values = roundtrip(weight, INT8, 32)
    assert scales.dtype == torch.float32
    assert relative_rmse(values, weight) < 0.01
    assert fake_quantize(weight, Recipe.named("int8-channel")).dtype == dtype


def test_tiny_weights_do_not_hit_a_floor() -> None:
    """Catches a scale floor of 1e-5 that wipes out small groups, and a scale that underflows."""
    weight = 1e-12 * torch.randn(1, 32)
    assert relative_rmse(roundtrip(weight, INT8, 32)[2], weight) < 0.01
    smallest = torch.full((1, 4), 1e-45)
    assert (roundtrip(smallest, INT8, 4)[2] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "-inf"])
def test_nonfinite_weights_stay_visible(value: float) -> None:
    """Catches a NaN that is silently turned into code 0 (bug log 39): its group becomes NaN."""
    weight = torch.randn(2, 64)
    weight[0, 3] = value
    _, codes, values = roundtrip(weight, INT4, 32)
    assert values[0, :32].isnan().all()
    assert torch.isfinite(values[0, 32:]).all()
    assert torch.isfinite(values[1]).all()
    assert (codes[0, :32] == 0).all()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_layout_does_not_matter(recipe: str, view: str) -> None:
    """Catches strides that are ignored (bug log 18)."""
    weight = VIEWS[view](torch.randn(10, 130))
    a, b = (fake_quantize(w, Recipe.named(recipe)) for w in (weight, weight.clone()))
    assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1, 1), (2, 7)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_odd_shapes(recipe: str, shape: tuple[int, int]) -> None:
    """Catches a crash on empty or odd weights (bug log 20)."""
    assert fake_quantize(torch.randn(shape), Recipe.named(recipe)).shape == shape


weights = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=70).map(
    lambda values: torch.tensor([values])
)
laws: Callable[..., Callable[..., None]] = given(weights, st.sampled_from(list(FORMATS)))


@settings(max_examples=80)
@laws
def test_error_is_at_most_half_a_step(weight: Tensor, name: str) -> None:
    """Catches clipping and rounding that loses more than s/2."""
    scales, codes, values = roundtrip(weight, FORMATS[name], 16)
    steps = scales.repeat_interleave(16, 1)[:, : weight.shape[1]]
    # w/s is rounded once, code·s once more.
    bound = steps.double() / 2 + 2**-23 * weight.double().abs()
    assert ((values.double() - weight.double()).abs() <= bound + 1e-44).all()
    assert codes.abs().max() <= FORMATS[name].qmax


@settings(max_examples=80)
@laws
def test_quantizing_twice_changes_nothing(weight: Tensor, name: str) -> None:
    """Catches a grid that moves when it is quantized again (a checkpoint saved dequantized)."""
    _, codes, values = roundtrip(weight, FORMATS[name], 16)
    again = roundtrip(values, FORMATS[name], 16)
    assert torch.equal(again[1], codes)
    assert torch.allclose(again[2], values, rtol=1e-6, atol=0)


@settings(max_examples=40)
@given(weights, st.integers(-10, 10))
def test_powers_of_two_pass_through(weight: Tensor, power: int) -> None:
    """Catches absolute constants in the choice of scales."""
    weight = torch.where(weight.abs() < 1e-20, 0.0, weight)
    scaled = torch.ldexp(weight, torch.tensor(power))
    assert torch.equal(roundtrip(scaled, INT4, 16)[1], roundtrip(weight, INT4, 16)[1])


STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ZEROS: dict[str, tuple[str, Zero]] = {
    "int4": ("int4", "none"),
    "int8": ("int8", "none"),
    "uint4 integer": ("uint4", "integer"),
    "uint8 integer": ("uint8", "integer"),
    "uint3 float": ("uint3", "float"),
    "uint4 float": ("uint4", "float"),
    "uint8 float": ("uint8", "float"),
}


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("kind", ZEROS)
@settings(max_examples=40)
@given(
    offset=st.sampled_from([0.0, 0.01, -0.3, 5.0, -100.0]),
    width=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_half_a_stored_step(kind: str, dtype: str, offset: float, width: float, seed: int) -> None:
    """Catches zeros that 16 bits move by thousands of steps, and scales rounded down at the end."""
    name, zero = ZEROS[kind]
    generator = torch.Generator().manual_seed(seed)
    weight = offset + width * (torch.rand(20, 80, generator=generator) - 0.3)
    spec = WeightSpec(INT_FORMATS[name], PerGroup(32), zero, scale_dtype=STORED[dtype])
    made = quantize_weight(weight, spec)
    steps = made.qparams.scales.double().repeat_interleave(32, 1)[:, :80]
    # Float zeros of any size: w/s + zero is rounded once in float32.
    shift = 0.0 if made.qparams.zeros is None else made.qparams.zeros.double().abs().max()
    bound = steps * (0.5 + 2**-23 * (4 * shift + 256)) + 2**-22 * weight.double().abs()
    assert ((made.values.double() - weight.double()).abs() <= bound).all()


@pytest.mark.parametrize("method", ["rtn", "hqq"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_zeros_that_16_bits_do_not_hold(dtype: str, method: str) -> None:
    """Catches an infinite or shifted zero point of a narrow group far from 0."""
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(32), "float", scale_dtype=STORED[dtype])
    near, far = torch.randn(4, 64), 100 + 0.01 * torch.rand(4, 64)
    if method == "hqq":
        spec = replace(spec, method="hqq")
    make = quantize_weight if method == "rtn" else hqq
    assert make(near, spec).qparams.scales.dtype == STORED[dtype]
    made = make(far, spec)
    assert made.qparams.zeros is not None
    assert {made.qparams.scales.dtype, made.qparams.zeros.dtype} == {torch.float32}
    assert (made.values - far).abs().max() <= 0.01 / 15


@pytest.mark.parametrize("scale", STORED)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("zero", ["none", "integer", "float"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_the_largest_numbers_stay_finite(bits: int, zero: Zero, dtype: str, scale: str) -> None:
    """Catches a grid point beyond the range, which would be an infinity."""
    most = torch.finfo(STORED[dtype]).max
    shares = torch.tensor([[-1.0, 1.0, 0.0, 0.5], [1.0, 1.0, 0.9, 0.8], [-1.0, -0.99, 0.0, 0.0]])
    weight = (most * torch.cat([shares * part for part in (1.0, 0.999, 0.997, 0.99)])).to(
        STORED[dtype]
    )
    fmt = INT_FORMATS[f"int{bits}" if zero == "none" else f"uint{bits}"]
    spec = WeightSpec(fmt, PerChannel(), zero, scale_dtype=STORED[scale])
    made = quantize_weight(weight, spec)
    for values in (made.values, affine.fake_quantize(weight, spec)):
        assert torch.isfinite(values).all()
        steps = made.qparams.scales.double()
        off = (values.double() - weight.double()).abs()
        assert (off <= 0.51 * steps + 2**-7 * weight.double().abs()).all()


# kernel_anchors §2.1a, the columns sym4 and sym8. Its sym4 column divides by 7.5 ("g128 .1103");
# §1.1 gives .1173 for absmax/7, which is ours.
GAUSSIAN = {"int8-g32": 0.00536, "int8-g64": 0.00594, "int8-g128": 0.00644, "int4-g128": 0.1173}


@pytest.mark.parametrize("recipe", GAUSSIAN)
def test_gaussian_error_as_published(recipe: str) -> None:
    """Catches another definition of symmetric: they are 6 to 17 % apart on a Gaussian."""
    weight = torch.randn(2000, 512)
    error = relative_rmse(fake_quantize(weight, Recipe.named(recipe)), weight)
    assert error == pytest.approx(GAUSSIAN[recipe], rel=0.01)


def test_a_weight_is_a_float_matrix() -> None:
    """Catches already quantized or stacked weights being quantized as if they were plain."""
    for bad in (torch.zeros(2, 3, 4), torch.zeros(2, 3).to(torch.int8)):
        with pytest.raises(ValueError, match="float matrix"):
            choose_qparams(bad, WeightSpec(INT8, PerChannel()))
