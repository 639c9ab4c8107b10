"""Expected rounding errors against drawn ones: of other matrices of the same law, in float64."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.quantize import weight_law
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.error_bounds import expected_square
from quantwatch_kernels.quantize.recipe import Recipe

ROWS, COLUMNS = 128, 384
Draw = Callable[[torch.Generator], Tensor]


def normal(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=generator)


def flat(generator: torch.Generator) -> Tensor:
    return torch.rand(ROWS, COLUMNS, generator=generator)


def laplace(generator: torch.Generator) -> Tensor:
    chance = flat(generator).double().clamp(1e-9, 1 - 1e-9) - 0.5
    return -(chance.sign() * (1 - 2 * chance.abs()).log()).float()


def student(generator: torch.Generator) -> Tensor:
    """Four degrees of freedom: its kurtosis is infinite."""
    chi = torch.randn(ROWS, COLUMNS, 4, generator=generator).square().mean(-1)
    return normal(generator) / chi.sqrt()


def per_group(size: int) -> Tensor:
    """The same factors for every matrix: a law belongs to a place."""
    drawn = torch.randn(ROWS, COLUMNS // size, generator=torch.Generator().manual_seed(9))
    return drawn.repeat_interleave(size, 1)


COLUMN = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(8))
LAWS: dict[str, Draw] = {
    "normal": normal,
    "flat around 0": lambda g: flat(g) - 0.5,
    "flat, one sign": flat,
    "Laplace": laplace,
    "Student 4": student,
    "columns of other spread": lambda g: normal(g) * (0.7 * COLUMN).exp(),
    "rows of other spread": lambda g: normal(g) * (2 * torch.linspace(-1, 1, ROWS)[:, None]).exp(),
    "groups of other spread": lambda g: normal(g) * (0.4 * per_group(64)).exp(),
    "groups of other mean": lambda g: normal(g) + per_group(16),
}
FORMATS = (
    *("int2-g16", "uint2-g16", "int3-g64", "uint3-g64"),
    *("int4-g64", "uint4-channel", "int6-g64", "int8-channel", "int8-tensor"),
)


def noise(weight: Tensor, name: str) -> tuple[float, float]:
    """Return what is expected of a matrix, and what rounding does to it."""
    quantized = quantize_weight(weight, Recipe.named(name).weights)
    expected = expected_square(weight, quantized).sum().item()
    return expected, (quantized.values.double() - weight.double()).square().sum().item()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("law", LAWS)
def test_the_error_of_other_draws_is_predicted(law: str, name: str) -> None:
    """Catches a law that is assumed (normal, s ≪ σ) instead of measured: up to 1 dB off."""
    draws = [LAWS[law](torch.Generator().manual_seed(seed)) for seed in range(5)]
    expected, _ = noise(draws[0], name)
    others = sum(noise(weight, name)[1] for weight in draws[1:]) / 4
    # The step of a whole matrix or row is its largest weight's: of this draw, not of others.
    if name.endswith(("-tensor", "-channel")):
        others = noise(draws[0], name)[1]
    assert abs(10 * math.log10(expected / others)) < 0.3


def test_a_prediction_is_none_of_the_rounded_values() -> None:
    """Catches the error itself passed off as its prediction: order within a group must not count,
    and new values between a group's ends must not either.
    """
    weight = normal(torch.Generator().manual_seed(0))
    expected, measured = noise(weight, "int2-g16")
    shuffled = weight.view(ROWS, -1, 16)[
        ..., torch.randperm(16, generator=torch.Generator().manual_seed(1))
    ].reshape(ROWS, COLUMNS)
    assert noise(shuffled, "int2-g16")[0] == pytest.approx(expected, rel=1e-9)
    # Everything but the ends on the grid: what rounding does is nearly nothing, the law hardly is.
    quantized = quantize_weight(weight, Recipe.named("int8-g16").weights)
    on_grid, exact = noise(quantized.values, "int8-g16")
    usual, _ = noise(weight, "int8-g16")
    assert exact < 1e-6 * measured
    assert on_grid == pytest.approx(usual, rel=0.1)


@pytest.mark.parametrize("name", ["int2-g16", "uint3-g64", "int4-channel"])
def test_stochastic_rounding_errs_more(name: str) -> None:
    """Catches the expectation of rounding to nearest for a rule that errs about twice as much."""
    weight = normal(torch.Generator().manual_seed(1))
    spec = replace(Recipe.named(name).weights, rounding="stochastic")
    drawn, generator = 0.0, torch.Generator().manual_seed(2)
    for _ in range(20):
        quantized = quantize_weight(weight, spec, generator)
        drawn += (quantized.values.double() - weight.double()).square().sum().item() / 20
    expected = expected_square(weight, quantized).sum().item()
    assert abs(10 * math.log10(expected / drawn)) < 0.1


@pytest.mark.parametrize("is_stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("begin", "end"), [(0.1, 0.3), (-0.7, 3.2), (2.5, 2.50001), (-1.0, -1.0), (200.2, 255.0)]
)
def test_the_mean_error_between_two_places(begin: float, end: float, is_stochastic: bool) -> None:
    """Against a plain sum over 200,001 points."""
    x = torch.linspace(begin, end, 200_001, dtype=torch.float64)
    part = x - x.floor()
    squares = part * (1 - part) if is_stochastic else (x - x.round()).square()
    ends = torch.tensor([begin, end], dtype=torch.float64)
    found = weight_law._mean_error(ends[:1], ends[1:], is_stochastic).item()
    assert found == pytest.approx(torch.trapezoid(squares).item() / 200_000, abs=1e-8)


def test_a_broken_group_says_nothing_of_the_others() -> None:
    """Catches one NaN that takes its row's, or the matrix's, expectation away."""
    weight = normal(torch.Generator().manual_seed(3))
    whole = expected_square(weight, quantize_weight(weight, Recipe.named("int2-g16").weights))
    for value in (math.nan, math.inf):
        weight[2, 3] = value
        quantized = quantize_weight(weight, Recipe.named("int2-g16").weights)
        found = expected_square(weight, quantized)
        assert found[2, :16].isnan().all()
        rest = torch.cat([found[2, 16:], found[3:].flatten(), found[:2].flatten()])
        known = torch.cat([whole[2, 16:], whole[3:].flatten(), whole[:2].flatten()])
        assert rest.isfinite().all()
        assert rest.sum().item() == pytest.approx(known.sum().item(), rel=0.01)


@pytest.mark.parametrize(
    "weight",
    [
        torch.full((3, 20), 0.3),
        torch.zeros(3, 20),
        torch.tensor([[0.3, -1.2, 0.7, 2.1, -0.4]]),
        torch.tensor([[7.0]]),
    ],
    ids=["constant", "zeros", "one row", "one weight"],
)
def test_little_is_known_of_little(weight: Tensor) -> None:
    """Catches 0 ÷ 0 where nothing varies."""
    for name in ("int2-g16", "uint2-g16", "int4-channel"):
        quantized = quantize_weight(weight, Recipe.named(name).weights)
        found = expected_square(weight, quantized)
        assert found.isfinite().all()
        if (weight == weight[0, 0]).all():
            error = (quantized.values.double() - weight.double()).square()
            assert torch.allclose(found, error, atol=1e-12)
