"""Bounds against what rounding does: never violated, and near enough to be of use."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, INT_FORMATS, FloatFormat
from quantwatch_kernels.quantize import error_bounds as eb
from quantwatch_kernels.quantize.affine import QuantizedWeight, quantize_weight
from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, PerTensor, Recipe, WeightSpec

GRANULARITIES = (PerTensor(), PerChannel(), PerGroup(16), PerGroup(7))
SPECS = [
    WeightSpec(fmt, granularity, zero)  # type: ignore[arg-type]
    for fmt in INT_FORMATS.values()
    for granularity in GRANULARITIES
    for zero in (("none",) if fmt.symmetric else ("integer", "float"))
]
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def awkward(kind: str, seed: int) -> torch.Tensor:
    """Weights that rounding likes least."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 45, generator=generator)
    return {
        "normal": w,
        "constant": w[:, :1].expand(6, 45),
        "zeros": torch.zeros(6, 45),
        "one sign": w.abs() + 3,
        "ties": (w * 8).round() / 2 + 0.25,
        "outlier": torch.cat([1e4 * w[:, :1], w[:, 1:] * 1e-3], 1),
        "subnormal": w * 1e-40,
        "huge": w * 1e37,
        "signed zeros": torch.where(w > 0, 0.0, -0.0),
    }[kind]


KINDS = (
    "normal",
    "constant",
    "zeros",
    "one sign",
    "ties",
    "outlier",
    "subnormal",
    "huge",
    "signed zeros",
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.sampled_from(SPECS),
    st.sampled_from(KINDS),
    st.integers(0, 99),
    st.sampled_from(SCALE_DTYPES),
)
def test_no_weight_exceeds_its_worst_case(
    spec: WeightSpec, kind: str, seed: int, scale_dtype: torch.dtype
) -> None:
    """Catches a bound without its half step, clip or rounding term, for every format (bug log 4)."""
    weight = awkward(kind, seed)
    quantized = quantize_weight(weight, replace(spec, scale_dtype=scale_dtype))
    error = (quantized.values.double() - weight.double()).abs()
    bound = eb.worst_case(weight, quantized)
    assert (error <= bound).all(), (error / bound).max()
    expected = eb.expected_square(weight, quantized)
    assert torch.isfinite(expected).all()
    assert (expected >= 0).all()
    assert (expected.sqrt() <= bound * (1 + 1e-9)).all()


@settings(max_examples=40)
@given(st.sampled_from(SPECS), st.sampled_from(KINDS[:6]), st.integers(0, 99))
def test_no_dot_product_exceeds_its_worst_case(spec: WeightSpec, kind: str, seed: int) -> None:
    """Catches a dot bound with one step for all groups."""
    weight = awkward(kind, seed)
    quantized = quantize_weight(weight, spec)
    x = torch.randn(5, 45, generator=torch.Generator().manual_seed(seed)) ** 3
    error = x.double() @ (quantized.values.double() - weight.double()).T
    bound = eb.dot_worst_case(x, eb.worst_case(weight, quantized))
    assert (error.abs() <= bound * (1 + 1e-12) + 1e-300).all()


def test_the_worst_case_is_reached() -> None:
    """Catches a bound that holds because it is ten times too large."""
    weight = torch.tensor([[7.0, 2.5, -3.5, 0.49]])
    quantized = quantize_weight(weight, Recipe.named("int4-channel").weights)
    bound = eb.worst_case(weight, quantized)
    assert bound[0] == pytest.approx(0.5, rel=1e-5)
    error = (quantized.values - weight).abs()
    assert (error[0, 1:3] == 0.5).all()


def test_what_is_clipped_errs_by_what_is_cut_off() -> None:
    """Catches "half a step" where the range was narrowed: the clip term of the bound."""
    spec = Recipe.named("int4-channel").weights
    params = QParams(torch.tensor([[0.5]]), None)
    weight = torch.tensor([[5.0, -9.0, 0.2]])
    codes = torch.tensor([[7, -7, 0]], dtype=torch.int8)
    quantized = QuantizedWeight(codes, params, spec)
    assert eb.worst_case(weight, quantized)[0].tolist() == pytest.approx([1.5, 5.5, 0.25], rel=1e-5)
    assert eb.expected_square(weight, quantized)[0, :2].tolist() == pytest.approx([2.25, 30.25])


def test_each_group_has_its_own_step_in_a_dot_product() -> None:
    """Catches Σ|x|·s/2 with the largest step of the row: 16 times too large here."""
    weight = torch.cat([torch.full((1, 16), 0.007), torch.full((1, 16), 7.0)], 1)
    weight[0, ::2] /= 3
    quantized = quantize_weight(weight, Recipe.named("int4-g16").weights)
    x = torch.ones(1, 32)
    bound = eb.dot_worst_case(x, eb.worst_case(weight, quantized)).item()
    assert bound == pytest.approx(16 * 0.0005 + 16 * 0.5, rel=1e-4)


def test_stochastic_rounding_errs_by_less_than_a_step() -> None:
    """Catches half a step for a rule that may go either way."""
    spec = replace(Recipe.named("int4-g16").weights, rounding="stochastic")
    weight = awkward("normal", 0)
    quantized = quantize_weight(weight, spec, torch.Generator().manual_seed(0))
    error = (quantized.values.double() - weight.double()).abs()
    bound = eb.worst_case(weight, quantized)
    assert (error <= bound).all()
    assert (error > 0.6 * bound).any()


@pytest.mark.parametrize(
    "name",
    [f"{u}int{b}-{g}" for u in ("", "u") for b in range(2, 9) for g in ("g16", "g64", "channel")],
)
def test_predicted_sqnr_of_normal_weights(name: str) -> None:
    """Catches s²/12 where a step is as wide as the distribution: 3 dB off at 2 bits."""
    weight = 0.1 * torch.randn(256, 576, generator=torch.Generator().manual_seed(0))
    quantized = quantize_weight(weight, Recipe.named(name).weights)
    predicted = eb.predicted_sqnr_db(weight, eb.expected_square(weight, quantized))
    assert abs(predicted - eb.measured_sqnr_db(weight, quantized.values)) < 0.3


@pytest.mark.parametrize(
    ("name", "relative_rmse"),
    [("int4-g128", 0.1173), ("uint4-g128", 0.1006), ("int8-g128", 0.00644), ("uint4-g32", 0.0808)],
)
def test_known_errors_of_a_gaussian(name: str, relative_rmse: float) -> None:
    """The measured table of kernel_anchors §1.1: a prediction that agrees only with itself fails."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1))
    quantized = quantize_weight(weight, Recipe.named(name).weights)
    predicted = 10 ** (-eb.predicted_sqnr_db(weight, eb.expected_square(weight, quantized)) / 20)
    assert predicted == pytest.approx(relative_rmse, rel=0.012)


def test_textbook_sqnr() -> None:
    """6.02·b + 4.77 − 20·log10(absmax/rms), by hand for a sine-like row."""
    weight = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    assert eb.textbook_sqnr_db(8, weight) == pytest.approx(8 * 6.0206 + 4.7712, abs=1e-3)


def test_expected_size_of_a_dot_product() -> None:
    """Catches Σ|x|·s/√12: independent errors add in squares, not in sizes."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(2000, 256, generator=generator)
    x = torch.randn(4, 256, generator=generator)
    quantized = quantize_weight(weight, Recipe.named("int8-channel").weights)
    error = x.double() @ (quantized.values.double() - weight.double()).T
    ratio = error / eb.dot_expected(x, eb.expected_square(weight, quantized))
    assert ratio.square().mean().sqrt().item() == pytest.approx(1, abs=0.05)


def test_methods_that_move_weights_have_no_bound() -> None:
    """Catches a bound claimed for GPTQ, where a weight may be off by more than half a step."""
    spec = replace(Recipe.named("int4-g16").weights, method="gptq")
    quantized = replace(
        quantize_weight(awkward("normal", 0), replace(spec, method="nearest")), spec=spec
    )
    with pytest.raises(ValueError, match="gptq moves weights"):
        eb.worst_case(awkward("normal", 0), quantized)


def test_a_broken_group_has_no_bound() -> None:
    """Catches a NaN weight that looks bounded; the other groups keep their bounds (bug log 39)."""
    weight = awkward("normal", 0)[:, :32].clone()
    weight[2, 3] = math.nan
    quantized = quantize_weight(weight, Recipe.named("int4-g16").weights)
    bound = eb.worst_case(weight, quantized)
    assert bound[2, :16].isnan().all()
    assert bound[2, 16:].isfinite().all()
    assert bound[:2].isfinite().all()


@pytest.mark.parametrize("fmt", [FP16, BF16, FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
def test_float_formats(fmt: FloatFormat) -> None:
    """Catches float16 as a fixed step: relative above 6.1e-5, fixed below, nothing above 65504."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.linspace(math.log2(fmt.smallest_subnormal) - 2, math.log2(fmt.largest), 4000)
    x = torch.randn(4000, generator=generator).sign() * torch.exp2(exponents)
    x = x[x.abs() <= fmt.largest].double().float()
    error = (x.to(fmt.dtype).double() - x.double()).abs()
    bound = eb.float_worst_case(x, fmt)
    assert (error <= bound).all()
    normal = x.abs() >= fmt.smallest_normal
    assert (error / bound)[normal].max() > 0.95 / (1 + fmt.unit_roundoff)
    assert (error / bound)[~normal].max() > 0.5
    assert (bound[~normal] == fmt.smallest_subnormal / 2).all()
    beyond = torch.tensor([fmt.largest * 1.1]).double()
    assert eb.float_worst_case(beyond, fmt).isinf().all()
    assert eb.float_expected_square(beyond, fmt).isinf().all()


def test_gamma() -> None:
    """Catches K·u as a bound, and one where there is none: float16 from 2048 terms."""
    assert eb.gamma(1000, 2.0**-11) == pytest.approx(1000 / 1048)
    with pytest.raises(ValueError, match="2048 terms"):
        eb.gamma(2048, 2.0**-11)


def test_sums_in_float32_stay_below_gamma() -> None:
    """Catches an accumulation bound in units of the result: it cancels, the bound may not."""
    generator = torch.Generator().manual_seed(4)
    x, w = torch.randn(8, 1536, generator=generator), torch.randn(16, 1536, generator=generator)
    x[:, 1] = -x[:, 0] * 1e4
    error = (x @ w.T).double() - x.double() @ w.double().T
    assert (error.abs() <= eb.accumulation_worst_case(x, w, 2.0**-24)).all()
    assert (error.abs() > 0).any()


def test_empty_weights() -> None:
    """Catches a reshape of nothing."""
    for shape in ((0, 16), (3, 0)):
        weight = torch.zeros(shape)
        quantized = quantize_weight(weight, Recipe.named("int4-g16").weights)
        assert eb.worst_case(weight, quantized).shape == shape
        assert eb.expected_square(weight, quantized).shape == shape
