"""Stochastic rounding: the mean of many draws is the weight, at the ends of a group too."""

from typing import Any

import pytest
import torch
from torch import Generator

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.qparams import choose_qparams
from quantwatch_kernels.quantize.recipe import PerGroup, PerTensor, WeightSpec
from quantwatch_kernels.quantize.rounding import round_to_code
from quantwatch_kernels.quantize.stochastic import unclipped_qparams

DRAWS = 4000
GROUPS = {
    "half a step below zero": [-3.5, 11.5, 0.25, 1.25],
    "spread": [-0.3137, 0.7713, 0.1019, -0.2501],
    "positive": [10.51, 13.97, 12.003, 11.1],
    "negative": [-13.97, -10.51, -12.003, -11.1],
    "far from zero": [5.0, 5.0095, 5.0031, 5.0077],
    "lopsided": [-1.0, 0.0021, 0.0013, -0.4],
    "tiny": [-3e-7, 5.3e-7, 1e-7, 2e-7],
    "constant": [0.1, 0.1, 0.1, 0.1],
    "zeros": [0.0, 0.0, -0.0, 0.0],
}
KINDS = [
    *((f"int{bits}", "none") for bits in (2, 3, 4, 8)),
    *((f"uint{bits}", zero) for bits in (2, 3, 4, 8) for zero in ("integer", "float")),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "zero"), KINDS)
def test_the_mean_is_the_weight(name: str, zero: Any, dtype: torch.dtype, group: str) -> None:
    """Catches a largest weight that is always half a step low, since its upper code doesn't exist."""
    row = torch.tensor([GROUPS[group]])
    fmt = INT_FORMATS[name]
    spec = WeightSpec(fmt, PerGroup(4), zero, scale_dtype=dtype, rounding="stochastic")
    quantized = quantize_weight(row.expand(DRAWS, -1), spec, Generator().manual_seed(3))
    values = quantized.values.double()
    step = quantized.qparams.scales[0].double()
    error = (values.mean(0) - row[0].double()).abs()
    # A draw that hardly ever comes up leaves no spread to see: a thousandth of a step for it.
    assert (error <= 4 * values.std(0) / DRAWS**0.5 + 1e-3 * step + 1e-6 * row[0].abs()).all()
    assert ((values - row.double()).abs() <= 1.001 * step + 1e-6 * row.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "zero"), KINDS)
def test_every_weight_lies_between_two_codes(name: str, zero: Any, dtype: torch.dtype) -> None:
    """Catches ends outside the grid for some offset and width, whatever the draw."""
    generator = Generator().manual_seed(0)
    width = torch.exp(4 * torch.randn(3000, 1, generator=generator))
    offset = torch.exp(4 * torch.randn(3000, 1, generator=generator)) * width.sign()
    weight = width * torch.randn(3000, 8, generator=generator) + offset - offset.flip(0)
    fmt = INT_FORMATS[name]
    spec = WeightSpec(fmt, PerGroup(8), zero, scale_dtype=dtype, rounding="stochastic")
    made = unclipped_qparams(weight, spec)
    places = weight.double() / made.scales.double()
    zeros = 0.0 if made.zeros is None else made.zeros.double()
    # Float32 rounds the place on its way to a code; nothing more may stick out.
    slack = 2**-22 * (places.abs() + fmt.qmax)
    assert (places + zeros >= fmt.qmin - slack).all()
    assert (places + zeros <= fmt.qmax + slack).all()
    # Given up: one step of qmax, and what 16 bits round; float32 decides in a group far from 0.
    near = weight.amax(1) - weight.amin(1) > 1e-3 * weight.abs().amax(1)
    assert near.float().mean() > 0.8
    plain = choose_qparams(weight, spec).scales.float()
    fewer = fmt.qmax / (fmt.qmax - 1) if zero != "none" else 1.0
    assert (made.scales.float() <= plain * fewer * 1.05)[near].all()


def test_rounding_alone_is_unbiased() -> None:
    """Catches noise that is added after, or scaled: 0.25 goes up in a quarter of the draws."""
    steps = torch.tensor([-1.75, -0.5, 0.0, 0.25, 0.999, 3.0]).expand(DRAWS, -1)
    codes = round_to_code(steps, Generator().manual_seed(1)).double()
    error = (codes.mean(0) - steps[0].double()).abs()
    assert (error <= 4 * codes.std(0) / DRAWS**0.5).all()
    assert ((codes - steps).abs() < 1).all()


def test_a_whole_matrix_shares_its_scale() -> None:
    spec = WeightSpec(INT_FORMATS["uint4"], PerTensor(), "integer", rounding="stochastic")
    made = unclipped_qparams(torch.tensor([[0.0, 1.0], [-3.5, 11.5]]), spec)
    assert made.zeros is not None
    for each in (made.scales, made.zeros):
        assert (each == each[0]).all()


def test_stochastic_needs_a_generator() -> None:
    spec = WeightSpec(INT_FORMATS["int4"], PerGroup(4), rounding="stochastic")
    with pytest.raises(ValueError, match="needs a generator"):
        quantize_weight(torch.randn(2, 4), spec)
