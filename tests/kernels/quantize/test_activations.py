"""Rounded inputs of linear layers: the rule, the laws, integer arithmetic, and hooks around them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.quantize.activations import (
    ActivationQuantizer,
    add_activation_quantizer,
    fake_quantize_input,
    fake_quantize_input_reference,
    input_qparams,
    integer_linear,
    quantize_input,
)
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.hadamard import Hadamard
from quantwatch_kernels.quantize.interpose import (
    add_input_transform,
    carry_transforms,
    transformed_input,
)
from quantwatch_kernels.quantize.observers import tensor_qparams
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    Granularity,
    PerChannel,
    PerGroup,
    PerTensor,
    WeightSpec,
)
from quantwatch_kernels.testing import VIEWS, assert_close

UINT8, UINT4, INT4 = (INT_FORMATS[name] for name in ("uint8", "uint4", "int4"))
GRANULARITIES: dict[str, Granularity] = {
    "token": PerChannel(),
    "group": PerGroup(16),
    "short": PerGroup(20),
    "tensor": PerTensor(),
}
FORMATS = {name: INT_FORMATS[name] for name in ("int8", "uint8", "int4", "uint4")}
W8 = WeightSpec(INT8, PerChannel())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
@pytest.mark.parametrize("clip_ratio", [1.0, 0.9])
def test_against_its_twin(fmt: Any, granularity: Any, clip_ratio: float) -> None:
    """Catches groups across rows, a clip of one end only, a scale per tensor called per token."""
    x = torch.randn(3, 7, 48) * torch.exp(2 * torch.randn(3, 7, 1)) + 0.3
    spec = ActivationSpec(fmt, granularity, clip_ratio=clip_ratio)
    found, expected = fake_quantize_input(x, spec), fake_quantize_input_reference(x, spec)
    # A float32 quotient within an ulp of a half may go to the other neighbour: one step, rarely.
    far = (found - expected).abs() > 1e-5 * expected.abs() + 1e-6
    assert far.float().mean() < 2e-3
    assert (found[far] - expected[far]).abs().le(1.001 * x.abs().max() * 2 / fmt.qmax).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
def test_error_is_at_most_half_a_step(fmt: Any, granularity: Any) -> None:
    x = torch.randn(9, 48)
    spec = ActivationSpec(fmt, granularity)
    scales = input_qparams(x, spec).scales.repeat_interleave(granularity.group_size(48), 1)[:, :48]
    # An integer zero point shifts both ends by up to half a step: one whole step at the ends.
    worst = 0.5001 if fmt.symmetric else 1.0001
    assert ((fake_quantize_input(x, spec) - x).abs() <= worst * scales).all()


def test_codes_and_values_agree() -> None:
    x = torch.randn(5, 48)
    for granularity in GRANULARITIES.values():
        spec = ActivationSpec(UINT4, granularity)
        made = input_qparams(x, spec)
        size = granularity.group_size(48)
        assert made.zeros is not None
        codes = quantize_input(x, made, spec).float()
        zeros, scales = (
            t.float().repeat_interleave(size, 1)[:, :48] for t in (made.zeros, made.scales)
        )
        assert_close((codes - zeros) * scales, fake_quantize_input(x, spec), rtol=1e-6)


def test_halves_go_to_even_before_the_shift() -> None:
    """Catches round(x/s + zero), which differs on ties when the zero is odd (bug log 24, ao#1964)."""
    x = torch.tensor([[-1.0, 0.5, 1.5, 2.5, 14.0]])  # scale 1, zero 1
    spec = ActivationSpec(UINT4, PerChannel())
    assert quantize_input(x, input_qparams(x, spec), spec).tolist() == [[0, 1, 3, 3, 15]]


@pytest.mark.parametrize("name", ["token", "group"])
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    """Catches an outlier in one token that coarsens the others (quantized::linear_dynamic)."""
    x = torch.randn(64, 48)
    spec = ActivationSpec(INT8, GRANULARITIES[name])
    alone = fake_quantize_input(x[1:2], spec)
    x[0] *= 1000
    assert torch.equal(fake_quantize_input(x, spec)[1:2], alone)


@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=GRANULARITIES)
def test_empty_batch_and_zeros(granularity: Any) -> None:
    """Catches min of nothing (bug log 20) and 0/0 of a padded row (3)."""
    spec = ActivationSpec(UINT8, granularity)
    assert fake_quantize_input(torch.empty(2, 0, 48), spec).shape == (2, 0, 48)
    assert fake_quantize_input(torch.zeros(2, 48), spec).eq(0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    """Catches an infinity that saturates to a code, and a bad row that spoils good ones (39)."""
    x = torch.randn(3, 48)
    x[1, 20] = bad
    per_token = fake_quantize_input(x, ActivationSpec(INT8))
    assert per_token[1].isnan().all()
    assert per_token[[0, 2]].isfinite().all()
    per_group = fake_quantize_input(x, ActivationSpec(INT8, PerGroup(16)))
    assert per_group[1].isnan().sum() == 16
    static = ActivationSpec(INT8, PerTensor(), static=True)
    fixed = fake_quantize_input(x, static, tensor_qparams(-3.0, 3.0, INT8))
    assert fixed.isnan().nonzero().tolist() == [[1, 20]]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_and_views(view: Any, dtype: torch.dtype) -> None:
    """Catches scale arithmetic in 16 bits (bug log 6), and ignored strides (18)."""
    x = view(torch.randn(6, 48).mul(1e-3).to(dtype))
    y = fake_quantize_input(x, ActivationSpec(UINT8))
    assert y.dtype == dtype
    assert torch.equal(
        y, fake_quantize_input(x.float().contiguous(), ActivationSpec(UINT8)).to(dtype)
    )


@pytest.mark.parametrize("fmt", [INT8, UINT8], ids=["int8", "uint8"])
@pytest.mark.parametrize("granularity", [PerChannel(), PerTensor()], ids=["token", "tensor"])
@pytest.mark.parametrize("bias", [True, False])
def test_integer_arithmetic_gives_the_same(fmt: Any, granularity: Any, bias: bool) -> None:
    """Catches a forgotten −zero · Σ Wq, and a bias that is dropped or added twice (bug log 13)."""
    x, weight = torch.randn(5, 600) + 1, torch.randn(7, 600)
    b = torch.randn(7) if bias else None
    spec, quantized = ActivationSpec(fmt, granularity), quantize_weight(weight, W8)
    emulated = nn.functional.linear(fake_quantize_input(x, spec), quantized.values, b)
    exact = integer_linear(x, spec, quantized, b)
    assert (emulated - exact).norm() / exact.norm() < 4e-6


def test_integer_arithmetic_is_exact_beyond_float32() -> None:
    """Catches sums in float32, inexact from K = 1041 (bug log 15)."""
    ones = torch.ones(1, 4096)
    quantized = quantize_weight(ones, W8)
    found = integer_linear(ones, ActivationSpec(INT8), quantized)
    scale = quantized.qparams.scales.double().item()
    assert found.item() == 127 * 127 * 4096 * scale * scale


def test_integer_arithmetic_refuses_scales_inside_the_sum() -> None:
    weight = torch.randn(4, 64)
    with pytest.raises(ValueError, match="one scale per row"):
        integer_linear(
            weight, ActivationSpec(INT8), quantize_weight(weight, WeightSpec(INT8, PerGroup(32)))
        )
    with pytest.raises(ValueError, match="one activation scale per row"):
        integer_linear(weight, ActivationSpec(INT8, PerGroup(32)), quantize_weight(weight, W8))


class Counter:
    """A listener like the monitor's: sees calls, and replays one by `forward` itself."""

    def __init__(self, module: nn.Module) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        module.register_forward_pre_hook(lambda _m, args: self.inputs.append(args[0]))
        module.register_forward_hook(lambda _m, _a, out: self.outputs.append(out))


def test_hooks_fire_once_and_see_what_the_caller_gives() -> None:
    """Catches a wrapper that hides the tap, and rounding by a hook, which a replay passes by."""
    linear = nn.Linear(48, 8)
    plain = copy.deepcopy(linear)
    before = Counter(linear)
    add_activation_quantizer(linear, "q", ActivationSpec(INT4))
    after = Counter(linear)
    x = torch.randn(3, 48)
    y = linear(x)
    for counter in (before, after):
        assert len(counter.inputs) == len(counter.outputs) == 1
        assert counter.inputs[0] is x
        assert counter.outputs[0] is y
    assert torch.equal(linear.forward(x), y)
    assert torch.equal(y, plain(fake_quantize_input(x, ActivationSpec(INT4))))
    assert isinstance(linear, nn.Linear)
    assert dict(linear.named_parameters()).keys() == {"weight", "bias"}
    assert torch.equal(copy.deepcopy(linear)(x), y)


def test_transforms_run_in_the_order_they_were_added() -> None:
    """Catches rounding before the rotation that was to make it harmless."""
    linear, rotation = nn.Linear(48, 8), Hadamard(48, 1)
    add_input_transform(linear, rotation)
    add_activation_quantizer(linear, "q", ActivationSpec(INT4))
    x = torch.randn(3, 48)
    assert torch.equal(
        transformed_input(linear, x), fake_quantize_input(rotation(x), ActivationSpec(INT4))
    )
    other = nn.Linear(48, 8)
    carry_transforms(linear, other)
    assert torch.equal(transformed_input(other, x), transformed_input(linear, x))
    carry_transforms(nn.Linear(48, 8), other)
    assert isinstance(other.input_transforms, nn.ModuleList)
    assert len(other.input_transforms) == 2


def test_a_static_range_is_not_clipped_by_a_ratio() -> None:
    """Catches a ratio that is described, and digested, but never applied."""
    with pytest.raises(ValueError, match=r"clip_ratio belongs to dynamic ranges.*It is 0\.5"):
        ActivationSpec(INT4, PerTensor(), static=True, clip_ratio=0.5)
    assert ActivationSpec(INT4, PerTensor(), static=True, clip_ratio=1.0).static


@pytest.mark.parametrize("observer", ["minmax", "moving_average", "histogram", "mse", "percentile"])
def test_static_scales(observer: Any) -> None:
    spec = ActivationSpec(UINT8, PerTensor(), static=True, observer=observer)
    quantizer = ActivationQuantizer("layers.0.q_proj", spec)
    x = torch.randn(200, 48)
    with pytest.raises(
        ValueError, match=r"layers\.0\.q_proj: its static scale was never calibrated"
    ):
        quantizer(x)
    with pytest.raises(ValueError, match="never observed"):
        quantizer.freeze()
    quantizer.observe()
    with pytest.raises(ValueError, match=r"layers\.0\.q_proj: no activation was observed"):
        quantizer.freeze()
    assert quantizer(x) is x
    with pytest.raises(ValueError, match=r"layers\.0\.q_proj: 48 of 48 calibration activations"):
        quantizer(torch.full((1, 48), torch.nan))
    quantizer.freeze()
    inside = x.clamp(-2, 2)
    assert (quantizer(inside) - inside).abs().max() <= quantizer.scale
    outlier = torch.full((1, 48), 1e6)
    assert (quantizer(outlier) < 10).all()
    with pytest.raises(ValueError, match="needs the scale of an observer"):
        fake_quantize_input(x, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_the_largest_inputs_stay_finite(fmt: Any, dtype: torch.dtype) -> None:
    """Catches an outermost grid point that the input's dtype doesn't hold."""
    most = torch.finfo(dtype).max
    x = torch.tensor([[-most, most, 0.0, 1.0], [most, most / 2, 0.0, 0.0]], dtype=dtype)
    found = fake_quantize_input(x, ActivationSpec(fmt))
    assert torch.isfinite(found).all()
    assert ((found.double() - x.double()).abs() <= 1.02 * most / fmt.qmax).all()
