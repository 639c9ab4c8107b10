"""GPTQ against an independent, slow twin that works on the inverse Hessian, column by column."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.quantize.weight_specs import ZEROS, weight_spec
from torch import Tensor

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import dequantize, quantize, quantize_weight
from quantwatch_kernels.quantize.gptq import factorize, gptq, output_error, solve
from quantwatch_kernels.quantize.qparams import QParams, choose_qparams
from quantwatch_kernels.quantize.specs import (
    Clip,
    Granularity,
    PerChannel,
    PerGroup,
    PerTensor,
    WeightSpec,
)

SHARES: dict[str, Granularity] = {
    "groups, the last one short": PerGroup(48),
    "rows": PerChannel(),
    "tensor": PerTensor(),
}


def spec_of(zero: str, granularity: Granularity | None = None) -> WeightSpec:
    return weight_spec(zero, granularity or PerGroup(32), method="gptq")


def problem(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights, and the Hessian of correlated inputs of very different size."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.05 * torch.randn(rows, columns, generator=generator)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(3 * columns, columns, generator=generator, dtype=torch.float64) @ mixing
    x *= torch.rand(columns, generator=generator, dtype=torch.float64) ** 2
    return weight, 2 * x.T @ x / len(x)


def twin(weight: Tensor, hessian: Tensor, qparams: QParams, spec: WeightSpec) -> Tensor:
    """Optimal brain quantization in order of diag H: eliminate each column from H⁻¹ in turn."""
    diagonal = hessian.diagonal()
    damped = hessian + 0.01 * diagonal.mean() * torch.eye(len(hessian), dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    left = weight.double().clone()
    codes = torch.zeros_like(left)
    for j in torch.argsort(diagonal, descending=True, stable=True).tolist():
        chosen = quantize(left.float(), qparams, spec)
        values = dequantize(chosen, qparams, spec).double()
        codes[:, j] = chosen[:, j].double()
        error = (left[:, j] - values[:, j]) / inverse[j, j]
        left -= torch.outer(error, inverse[j])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, j] = 1.0  # column j is done: its row and column are zero otherwise
    return codes


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("zero", ZEROS)
def test_against_the_twin(zero: str, share: str) -> None:
    """Catches errors fed to the wrong column, a block boundary that drops some, scattered groups.

    A target within float32's error of the middle between two codes may fall to either side, and
    what comes after it then differs in that row: 3 rows of 40 at most, the output error within 1 %.
    """
    spec = spec_of(zero, SHARES[share])
    weight, hessian = problem(40, 200, 1)
    qparams = choose_qparams(weight, spec)
    codes = solve(weight, qparams, spec, factorize(hessian))
    expected = twin(weight, hessian, qparams, spec)
    different = int((codes.double() != expected).any(1).sum())
    assert different <= 3
    errors = [
        output_error(weight, dequantize(c.to(spec.format.storage), qparams, spec), hessian)
        for c in (codes, expected)
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


@pytest.mark.parametrize("zero", ZEROS)
def test_independent_inputs_are_rounded_to_nearest(zero: str) -> None:
    """Catches another rule of rounding than everywhere else (bug log 24): the same bits."""
    spec, (weight, _) = spec_of(zero), problem(7, 70, 2)
    weight[0, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.0, 0.0])  # ties
    quantized, notes = gptq(weight, spec, torch.eye(70))
    assert torch.equal(quantized.codes, quantize_weight(weight, spec).codes)
    assert not notes


@pytest.mark.parametrize("clip", ["none", "mse"])
@pytest.mark.parametrize("zero", ZEROS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**16))
def test_never_worse_than_nearest(zero: str, clip: Clip, seed: int) -> None:
    """Catches a solution that is returned though rounding would have been better."""
    spec = replace(spec_of(zero, PerGroup(16)), clip=clip)
    weight, hessian = problem(5, 24, seed)
    quantized, _ = gptq(weight, spec, hessian)
    nearest = quantize_weight(weight, replace(spec, clip="none"))
    before, after = (output_error(weight, q.values, hessian) for q in (nearest, quantized))
    assert after <= before
    assert quantized.spec == spec


def test_correlated_inputs_gain() -> None:
    """Catches a solver that falls back to nearest everywhere."""
    spec = spec_of("integer zero")
    weight, hessian = problem(32, 256, 5)
    quantized, notes = gptq(weight, spec, hessian)
    error = output_error(weight, quantized.values, hessian)
    assert error < 0.5 * output_error(weight, quantize_weight(weight, spec).values, hessian)
    assert not notes


def test_a_fallback_is_reported() -> None:
    """Catches a silent return to nearest: with three levels a clipped range sometimes costs more."""
    spec = replace(spec_of("symmetric", PerChannel()), format=INT_FORMATS["int2"], clip="mse")
    found = 0
    for seed in range(60):
        weight, hessian = problem(1, 6, seed)
        quantized, notes = gptq(weight, spec, hessian)
        if notes:
            found += 1
            assert "rounding to nearest was better" in notes[0]
            assert torch.equal(quantized.codes, quantize_weight(weight, spec).codes)
    assert 0 < found < 60


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("zero", ZEROS)
def test_descent_ends_where_no_single_code_helps(zero: str, share: str) -> None:
    """Catches slopes that aren't updated inside a block, or belong to another column."""
    spec = spec_of(zero, SHARES[share])
    weight, hessian = problem(3, 150, 4)
    qparams, feedback = choose_qparams(weight, spec), factorize(hessian)
    order = feedback.order
    damped = feedback.hessian.double()[torch.argsort(order)][:, torch.argsort(order)]

    def errors(codes: Tensor) -> Tensor:
        e = (dequantize(codes, qparams, spec) - weight).double()
        return ((e @ damped) * e).sum(1)

    least = errors(solve(weight, qparams, spec, feedback))
    for sweeps in (1, 2, 30):
        codes = solve(weight, qparams, spec, feedback, sweeps)
        assert bool((errors(codes) <= least * (1 + 1e-5)).all())
        least = errors(codes)
    for column in range(150):
        for step in (-1, 1):
            moved = codes.clone()
            moved[:, column] += step
            valid = (moved >= spec.format.qmin) & (moved <= spec.format.qmax)
            moved = torch.where(valid & (moved.short() - codes.short() == step), moved, codes)
            assert bool((errors(moved) >= least * (1 - 1e-5)).all())


def test_dead_inputs() -> None:
    """Catches 1/0 for inputs that are always 0, and weights changed beyond rounding (log 5)."""
    spec = spec_of("integer zero")
    weight, hessian = problem(6, 64, 3)
    dead = [3, 40, 41]
    hessian[dead] = 0
    hessian[:, dead] = 0
    quantized, notes = gptq(weight, spec, hessian)
    assert "3 inputs are always 0" in notes[0]
    nearest = quantize_weight(weight, spec)
    assert torch.equal(quantized.codes[:, dead], nearest.codes[:, dead])
    nothing, _ = gptq(weight, spec, torch.zeros(64, 64))
    assert torch.equal(nothing.codes, nearest.codes)


def test_damping_is_raised_and_reported() -> None:
    """Catches a failed Cholesky that ends the run, or is hidden (llm-compressor#142)."""
    spec = spec_of("symmetric")
    weight, hessian = problem(6, 64, 3)
    indefinite = hessian - 0.05 * hessian.diagonal().mean() * torch.eye(64)
    indefinite.diagonal().clamp_(min=1e-6)
    quantized, notes = gptq(weight, spec, indefinite)
    assert notes[0] == "damping of 0.01 times the mean diagonal was not enough"
    assert torch.isfinite(quantized.values).all()


def test_few_tokens_make_a_singular_hessian() -> None:
    """Catches codes out of range or NaN when there are fewer tokens than inputs."""
    spec = spec_of("float zero")
    weight, _ = problem(6, 64, 3)
    x = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    quantized, _ = gptq(weight, spec, 2 * x.T @ x / 5)
    nearest = quantize_weight(weight, spec)
    outputs = [((q.values.double() - weight.double()) @ x.T).norm() for q in (quantized, nearest)]
    assert outputs[0] < 0.3 * outputs[1]


@pytest.mark.parametrize("zero", ZEROS)
def test_odd_weights(zero: str) -> None:
    """Catches NaN from zero rows, and constant groups pulled off their value (log 3, 4)."""
    spec = spec_of(zero, PerGroup(16))
    weight, hessian = problem(4, 32, 0)
    weight[0] = 0
    weight[1] = 0.03
    weight[2, :16] = 1e-45
    values = gptq(weight, spec, hessian)[0].values
    assert torch.equal(values[0], torch.zeros(32))
    assert (values[1] - 0.03).abs().max() <= choose_qparams(weight, spec).scales[1].max()
    assert torch.isfinite(values).all()


def test_views_and_dtypes() -> None:
    """Catches memory read in another order than the shape says (bug log 18)."""
    spec = spec_of("integer zero")
    weight, hessian = problem(12, 64, 9)
    expected = gptq(weight, spec, hessian)[0].codes
    assert torch.equal(gptq(weight.T.contiguous().T, spec, hessian)[0].codes, expected)
    assert torch.equal(
        gptq(weight.bfloat16().float(), spec, hessian)[0].codes,
        gptq(weight.bfloat16(), spec, hessian)[0].codes,
    )


def test_bad_hessians() -> None:
    """Catches a Hessian of another layer, and NaN that would spread into codes."""
    spec, (weight, hessian) = spec_of("symmetric"), problem(4, 32, 0)
    with pytest.raises(ValueError, match=r"needs a Hessian \[32, 32\]"):
        gptq(weight, spec, hessian[:31, :31])
    for bad in (torch.nan, torch.inf):
        broken = hessian.clone()
        broken[3, 4] = bad
        with pytest.raises(ValueError, match="isn't finite"):
            gptq(weight, spec, broken)
    with pytest.raises(ValueError, match="positive definite"):
        gptq(weight, spec, 1e3 * (torch.ones(32, 32) - torch.eye(32)) + torch.eye(32))
