"""Fake quantization: the values of export bit for bit, gradients as a float64 twin has them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize import affine
from quantwatch_kernels.quantize.fake_quant import (
    fake_quantize,
    gradient_factor,
    scaled_codes,
    stored_qparams,
)
from quantwatch_kernels.quantize.latent import Latent, Learn, Start
from quantwatch_kernels.quantize.qparams import QParams, choose_qparams
from quantwatch_kernels.quantize.recipe import (
    Granularity,
    PerChannel,
    PerGroup,
    PerTensor,
    WeightSpec,
)
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.specs import Zero
from quantwatch_kernels.testing import VIEWS

GRANULARITIES: dict[str, Granularity] = {
    "tensor": PerTensor(),
    "channel": PerChannel(),
    "g8": PerGroup(8),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def specs(scale_dtype: torch.dtype = torch.float32) -> Iterator[WeightSpec]:
    for fmt in INT_FORMATS.values():
        for granularity in GRANULARITIES.values():
            zeros: tuple[Zero, ...] = ("none",) if fmt.symmetric else ("integer", "float")
            for zero in zeros:
                yield WeightSpec(fmt, granularity, zero, scale_dtype=scale_dtype)


def spec_id(spec: WeightSpec) -> str:
    name = next(key for key, value in GRANULARITIES.items() if value == spec.granularity)
    return f"{spec.format.name}-{name}-{spec.zero}"


def matrix(rows: int = 6, columns: int = 20, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


def inputs(weight: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor | None]:
    """Return scales and zeros that clip a part of the weight, as leaves."""
    qparams = choose_qparams(weight, spec)
    scales = (0.6 * qparams.scales.float()).requires_grad_()
    zeros = qparams.zeros
    if zeros is not None and zeros.is_floating_point():
        zeros = (0.6 * zeros.float() + 0.3).requires_grad_()
    return scales, zeros


def spread64(per_group: Tensor, spec: WeightSpec, columns: int) -> Tensor:
    size = spec.granularity.group_size(columns)
    return per_group.double().repeat_interleave(size, dim=-1)[:, :columns]


def twin(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, spec: WeightSpec, centre: Tensor
) -> Tensor:
    """Return the values in float64 with what rounding adds at `centre` held fixed.

    The function whose true derivative the straight-through gradient is. Scales are in use once
    plain and once in w/s, both learned: autograd and finite differences see both.
    """
    columns = weight.shape[1]
    s = spread64(scales, spec, columns)
    z = torch.zeros_like(s) if zeros is None else spread64(zeros, spec, columns)
    steps = weight.double() / s
    with torch.no_grad():
        at = centre.double() / s
        free = (at + z).round() if spec.zero == "float" else at.round() + z
        added = free - (at + z)
        inside = (free >= spec.format.qmin) & (free <= spec.format.qmax)
    codes = torch.where(inside, steps + z + added, free.clamp(spec.format.qmin, spec.format.qmax))
    return (codes - z) * s


@pytest.mark.parametrize("scales", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_forward_is_the_export_rule(dtype: torch.dtype, scales: torch.dtype) -> None:
    """Catches training for other values than are exported (kernel_anchors 1.1, §2.1 row 9)."""
    weight = matrix().to(dtype)
    weight[1] = 0
    weight[2] = 0.37
    weight[3, :8] = weight[3, :8].abs() + 3
    weight[4] *= 1e-6 if dtype == torch.float32 else 1
    for spec in specs(scales):
        qparams = choose_qparams(weight, spec)
        # Parameters that don't fit are float32, and learned as such.
        stored = replace(spec, scale_dtype=qparams.scales.dtype)
        made = fake_quantize(weight, qparams.scales.float(), qparams.zeros, stored)
        assert torch.equal(made, affine.fake_quantize(weight, spec)), spec
        codes = affine.quantize(weight, qparams, spec)
        held = scaled_codes(codes, qparams.scales, qparams.zeros, stored)
        assert torch.equal(held.to(dtype), made), spec


@pytest.mark.parametrize("spec", list(specs()), ids=spec_id)
def test_gradients_equal_the_float64_twins(spec: WeightSpec) -> None:
    """Catches a wrong mask, a lost zero point, a scale that takes part once, a wrong factor."""
    weight = matrix().requires_grad_()
    scales, zeros = inputs(weight.detach(), spec)
    learned = [weight, scales] + ([zeros] if zeros is not None and zeros.requires_grad else [])
    upstream = matrix(seed=1)
    ours = torch.autograd.grad(fake_quantize(weight, scales, zeros, spec), learned, upstream)
    value = twin(weight, scales, zeros, spec, weight.detach())
    # The storing of float32 scales is exact, so that the values agree as well.
    made = fake_quantize(weight, scales, zeros, spec)
    torch.testing.assert_close(made.double(), value, rtol=1e-6, atol=1e-6)
    wanted = torch.autograd.grad(value, learned, upstream.double())
    clipped = int((ours[0] == 0).sum())
    assert 0 < clipped < weight.numel()
    factor = gradient_factor(6, 20, spec)
    factors = (torch.ones(()), factor, factor)
    for mine, other, scaled in zip(ours, wanted, factors, strict=False):
        torch.testing.assert_close(mine, other * scaled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_gradients_equal_finite_differences(zero: Zero) -> None:
    """Catches a twin that shares our mistake: differences of its values, no derivative rule."""
    fmt = INT_FORMATS["int3" if zero == "none" else "uint3"]
    spec = WeightSpec(fmt, PerGroup(8), zero)
    weight = matrix()
    scales, zeros = inputs(weight, spec)
    learned = [weight.requires_grad_(), scales]
    learned += [zeros] if zeros is not None and zeros.requires_grad else []
    upstream = matrix(seed=1)
    ours = torch.autograd.grad(fake_quantize(weight, scales, zeros, spec), learned, upstream)
    # Everything that is rounded is decided at the start: the differences below move the rest.
    columns = weight.shape[1]
    start = [x.detach().double() for x in learned]
    s = spread64(start[1], spec, columns)
    z = torch.zeros_like(s) if zeros is None else spread64(zeros.detach(), spec, columns)
    at = start[0] / s
    free = (at + z).round() if zero == "float" else at.round() + z
    inside = (free >= fmt.qmin) & (free <= fmt.qmax)
    added, end = free - (at + z), free.clamp(fmt.qmin, fmt.qmax)

    def total(moved: list[Tensor]) -> float:
        s_moved = spread64(moved[1], spec, columns)
        z_moved = spread64(moved[2], spec, columns) if zero == "float" else z
        codes = torch.where(inside, moved[0] / s_moved + z_moved + added, end)
        return ((codes - z_moved) * s_moved * upstream.double()).sum().item()

    factor = gradient_factor(6, 20, spec)
    for place, (row, column) in ((0, (2, 3)), (0, (5, 19)), (1, (3, 1)), (1, (0, 2)), (2, (1, 0))):
        if place >= len(learned):
            continue
        slopes = []
        for sign in (1, -1):
            moved = [x.clone() for x in start]
            moved[place][row, column] += sign * 1e-5
            slopes.append(total(moved))
        wanted = (slopes[0] - slopes[1]) / 2e-5 * (1.0 if place == 0 else factor[column].item())
        assert ours[place][row, column].item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["int2", "int4", "int8", "uint3", "uint8"])
def test_the_gradient_is_one_at_the_bound(name: str) -> None:
    """Catches a clamp whose gradient vanishes at its bound (ao#4806), and one that never does."""
    fmt = INT_FORMATS[name]
    spec = WeightSpec(fmt, PerChannel(), "none" if fmt.symmetric else "integer")
    low, high = float(fmt.qmin), float(fmt.qmax)
    weight = torch.tensor([[low, high, low - 0.25, high + 0.25, low - 0.75, high + 0.75]])
    zeros = None if fmt.symmetric else torch.zeros(1, 1, dtype=torch.uint8)
    weight.requires_grad_()
    torch.autograd.backward([fake_quantize(weight, torch.ones(1, 1), zeros, spec).sum()])
    assert weight.grad is not None
    # Beyond the bound by less than half a step rounds to it and needs no clamping.
    assert weight.grad.tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0]]


def test_the_largest_weight_of_every_group_learns() -> None:
    """Catches a mask on w/s, which one float32 rounding above qmax switches off (ao#4806)."""
    weight = matrix(64, 256).requires_grad_()
    spec = WeightSpec(INT_FORMATS["int4"], PerGroup(8))
    qparams = choose_qparams(weight.detach(), spec)
    steps = (weight.detach() / qparams.scales.repeat_interleave(8, 1)).abs()
    assert (steps > 7).any(), "no rounding above qmax: the test tests nothing"
    torch.autograd.backward([fake_quantize(weight, qparams.scales, None, spec).sum()])
    assert weight.grad is not None
    assert (weight.grad == 1).all()


@pytest.mark.parametrize("view", VIEWS)
def test_layout_does_not_matter(view: str) -> None:
    """Catches strides that are ignored, forward or backward (bug log 18)."""
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(8), "float")
    weight = VIEWS[view](matrix(10, 26))
    scales, zeros = inputs(weight.detach().clone(), spec)
    assert zeros is not None
    found = []
    for w in (weight.detach(), weight.detach().clone()):
        leaf = w.requires_grad_()
        value = fake_quantize(leaf, scales, zeros, spec)
        found.append([value, *torch.autograd.grad(value.square().sum(), [leaf, scales, zeros])])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=50)
@given(
    st.sampled_from(list(specs(torch.bfloat16))),
    st.integers(1, 5),
    st.integers(1, 33),
    st.integers(0, 10**6),
)
def test_a_step_along_the_gradient_of_fixed_codes_is_exact(
    spec: WeightSpec, rows: int, columns: int, seed: int
) -> None:
    """Catches a derivative of (c − z)·s that isn't one: it is linear in s, so the change is known."""
    weight = matrix(rows, columns, seed)
    qparams = choose_qparams(weight, spec)
    codes = affine.quantize(weight, qparams, spec)
    # Steps of a power of two: bfloat16 scales hold them exactly.
    scales = torch.ones_like(qparams.scales, dtype=torch.float32).requires_grad_()
    upstream = matrix(rows, columns, seed + 1)
    before = scaled_codes(codes, scales, qparams.zeros, spec)
    (slope,) = torch.autograd.grad(before, scales, upstream)
    after = scaled_codes(codes, 2 * scales.detach(), qparams.zeros, spec)
    change = ((after - before).detach().double() * upstream).sum()
    factor = gradient_factor(rows, columns, spec).double()
    torch.testing.assert_close((slope.double() / factor).sum(), change, rtol=1e-4, atol=1e-3)


def test_zeros_of_fixed_codes_learn() -> None:
    """Catches a float zero whose gradient has the wrong sign or unit."""
    spec = WeightSpec(INT_FORMATS["uint3"], PerGroup(4), "float")
    codes = torch.tensor([[0, 3, 7, 1, 2, 5]], dtype=torch.uint8)
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[1.25, -0.5]], requires_grad=True)
    upstream = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    torch.autograd.backward([scaled_codes(codes, scales, zeros, spec)], [upstream])
    factor = gradient_factor(1, 6, spec)
    wanted = torch.tensor([[-0.5 * 10, -2.0 * 11]]) * factor
    torch.testing.assert_close(zeros.grad, wanted)
    torch.testing.assert_close(factor, torch.tensor([1 / 28**0.5, 1 / 14**0.5]))


def test_the_factor_counts_what_shares_a_scale() -> None:
    """Catches a scale of the whole matrix that learns as fast as one of a row."""
    fmt = INT_FORMATS["int4"]
    found = {
        name: gradient_factor(6, 20, WeightSpec(fmt, granularity)).tolist()
        for name, granularity in GRANULARITIES.items()
    }
    assert found == {
        "tensor": pytest.approx([840**-0.5]),
        "channel": pytest.approx([140**-0.5]),
        "g8": pytest.approx([56**-0.5, 56**-0.5, 28**-0.5]),
    }


def test_a_broken_scale_shows() -> None:
    """Catches a NaN scale whose weights get gradient 0 and never change again (bug log 39)."""
    weight = matrix(2, 8).requires_grad_()
    spec = WeightSpec(INT_FORMATS["int4"], PerChannel())
    scales = torch.tensor([[0.1], [torch.nan]], requires_grad=True)
    torch.autograd.backward([fake_quantize(weight, scales, None, spec).sum()])
    assert scales.grad is not None
    assert torch.isfinite(scales.grad[0]).all()
    assert scales.grad[1].isnan().all()


def test_what_cannot_be_exported_is_refused() -> None:
    """Catches scales of another layout, and zeros that the format has no place for."""
    spec = WeightSpec(INT_FORMATS["int4"], PerGroup(8))
    unsigned = WeightSpec(INT_FORMATS["uint4"], PerGroup(8), "float")
    weight, scales = matrix(), torch.ones(6, 3)
    integers = torch.zeros(6, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scales must be \[6, 3\]; they are \[6, 2\]"):
        fake_quantize(weight, scales[:, :2], None, spec)
    with pytest.raises(ValueError, match=r"kind 'none'.*they are \[6, 3\]"):
        fake_quantize(weight, scales, integers, spec)
    with pytest.raises(ValueError, match=r"kind 'float'.*they are None"):
        fake_quantize(weight, scales, None, unsigned)
    with pytest.raises(ValueError, match=r"'float' doesn't go with zeros of torch.uint8"):
        fake_quantize(weight, scales, integers, unsigned)
    with pytest.raises(ValueError, match="stochastic"):
        fake_quantize(
            weight, scales, None, WeightSpec(spec.format, PerGroup(8), rounding="stochastic")
        )
    with pytest.raises(ValueError, match=r"it is \[6, 0\]"):
        fake_quantize(weight[:, :0], scales, None, spec)


def test_no_rows() -> None:
    """Catches a crash on an empty matrix (bug log 20)."""
    spec = WeightSpec(INT_FORMATS["int4"], PerGroup(8))
    weight, scales = torch.empty(0, 20, requires_grad=True), torch.ones(0, 3, requires_grad=True)
    torch.autograd.backward([fake_quantize(weight, scales, None, spec).sum()])
    assert weight.grad is not None
    assert scales.grad is not None
    assert scales.grad.shape == (0, 3)


def test_scales_are_stored_as_they_are_trained() -> None:
    """Catches float32 scales in training and bfloat16 ones in the file."""
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(8), "float", scale_dtype=torch.bfloat16)
    weight = matrix()
    scales, zeros = torch.full((6, 3), 0.1234567), torch.full((6, 3), 7.654321)
    stored: QParams = stored_qparams(scales, zeros, spec)
    assert stored.scales.dtype == torch.bfloat16
    assert stored.zeros is not None
    assert stored.zeros.dtype == torch.bfloat16
    codes = affine.quantize(weight, stored, spec)
    exported = affine.dequantize(codes, stored, spec)
    assert torch.equal(fake_quantize(weight, scales, zeros, spec), exported)


@pytest.mark.parametrize("learn", ["weights", "scales", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_zeros_that_16_bits_do_not_hold_are_learned_as_float32(
    dtype: torch.dtype, learn: Learn
) -> None:
    """Catches a start whose float32 zeros are rounded away by the first forward pass."""
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(8), "float", scale_dtype=dtype)
    weight = 100 + 0.01 * matrix().clamp(-1, 1)
    start = affine.quantize_weight(weight, spec)
    assert start.qparams.scales.dtype == torch.float32
    latent = Latent(Start(Layer("0", "0", nn.Linear(20, 6), spec), start, weight), learn)
    made = latent.export()
    assert made.spec == spec
    assert made.qparams.scales.dtype == torch.float32
    assert torch.equal(latent.values().detach(), made.values)
    assert torch.equal(made.values, start.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_zero_that_drifts_out_of_16_bits(dtype: torch.dtype) -> None:
    """Catches a learned zero that is stored an odd number of steps away."""
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(8), "float", scale_dtype=dtype)
    scales, zeros = torch.full((1, 1), 0.125), torch.tensor([[20003.0]])
    stored = stored_qparams(scales, zeros, spec)
    assert stored.scales.dtype == torch.float32
    assert stored.zeros is not None
    assert torch.equal(stored.zeros, zeros)
    assert stored_qparams(scales, torch.tensor([[7.3]]), spec).scales.dtype == dtype
