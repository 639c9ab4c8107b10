"""The MSE clip: never worse than the plain range in its own objective, and right where it is odd."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.quantize.weight_specs import SHARES, ZEROS, weight_spec
from torch import Tensor

from quantwatch_kernels.quantize.affine import dequantize, quantize
from quantwatch_kernels.quantize.mse import hessian_cost, mse_qparams, search_qparams
from quantwatch_kernels.quantize.qparams import QParams, choose_qparams
from quantwatch_kernels.quantize.specs import (
    Granularity,
    PerGroup,
    PerTensor,
    WeightSpec,
)


def spec_of(zero: str, granularity: Granularity, dtype: torch.dtype = torch.float32) -> WeightSpec:
    return weight_spec(zero, granularity, clip="mse", scale_dtype=dtype)


def heavy(rows: int, columns: int, seed: int) -> Tensor:
    """Weights with outliers, some rows of one sign."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.rand(rows, columns, generator=generator) ** -0.4
    weight[::3] = weight[::3].abs()
    return 0.05 * weight


def costs(
    weight: Tensor, qparams: QParams, spec: WeightSpec, importance: Tensor, norm: float
) -> Tensor:
    """Σ importance |error|^norm of each group, float64, by the public operations alone."""
    values = dequantize(quantize(weight, qparams, spec), qparams, spec).double()
    powers = (values - weight.double()).abs() ** norm * importance.double()
    size = spec.granularity.group_size(weight.shape[1])
    groups = torch.stack([part.sum(1) for part in torch.split(powers, size, 1)], 1)
    return groups.sum().expand_as(groups) if isinstance(spec.granularity, PerTensor) else groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("zero", ZEROS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**16), norm=st.sampled_from([2.0, 2.4]))
def test_never_worse_than_the_plain_range(
    zero: str, share: str, dtype: torch.dtype, seed: int, norm: float
) -> None:
    """Catches codes chosen with a scale that is rounded later, and padding that counts as weights."""
    spec, weight = spec_of(zero, SHARES[share], dtype), heavy(6, 40, seed)
    importance = torch.rand(40, generator=torch.Generator().manual_seed(seed))
    plain = costs(weight, choose_qparams(weight, spec), spec, importance, norm)
    found = mse_qparams(weight, spec, importance, norm)
    assert found.scales.dtype == dtype
    clipped = costs(weight, found, spec, importance, norm)
    assert bool((clipped <= plain * (1 + 1e-5)).all())


@pytest.mark.parametrize("zero", ZEROS)
def test_the_best_of_the_grid(zero: str) -> None:
    """Catches a grid point that is skipped: every common share is tried here one by one."""
    spec, weight, ones = spec_of(zero, PerGroup(16)), heavy(8, 48, 3), torch.ones(48)
    found = costs(weight, mse_qparams(weight, spec), spec, ones, 2.0)
    assert found.sum() < 0.95 * costs(weight, choose_qparams(weight, spec), spec, ones, 2.0).sum()
    for percent in range(100, 37, -5):
        # Weights pulled in to a share of their range have exactly the range that the search tries.
        parts = weight.view(8, 3, 16)
        low, high = (end * percent / 100 for end in (parts.amin(-1), parts.amax(-1)))
        pulled = torch.maximum(torch.minimum(parts, high[..., None]), low[..., None]).view(8, 48)
        tried = costs(weight, choose_qparams(pulled, spec), spec, ones, 2.0)
        assert bool((found <= tried * (1 + 1e-5)).all())


def test_an_outlier_without_importance_is_clipped() -> None:
    """Catches importances applied to rows, or not at all."""
    spec = spec_of("symmetric", PerGroup(16))
    weight = heavy(4, 16, 0).clamp(-0.1, 0.1)
    weight[:, 5] = 0.24
    importance = torch.ones(16)
    importance[5] = 0
    indifferent = mse_qparams(weight, spec, importance)
    assert bool((indifferent.scales < 0.6 * choose_qparams(weight, spec).scales).all())


@pytest.mark.parametrize("zero", ZEROS)
def test_odd_groups(zero: str) -> None:
    """Catches zero, constant and broken groups that a search turns into something else (log 3)."""
    spec = spec_of(zero, PerGroup(4))
    weight = torch.tensor([[0.0] * 4 + [0.3] * 4 + [0.1, torch.nan, 0.2, 0.3] + [1e-44] * 2])
    found, plain = mse_qparams(weight, spec), choose_qparams(weight, spec)
    values = dequantize(quantize(weight, found, spec), found, spec)
    assert torch.equal(values[0, :4], torch.zeros(4))
    assert (values[0, 4:8] - 0.3).abs().max() <= found.scales[0, 1] / 2
    assert found.scales[0, 2].isnan()
    assert torch.equal(found.scales[0, 3:], plain.scales[0, 3:])


def test_float16_scales_that_do_not_fit_stay_float32() -> None:
    """Catches a search that saves a tensor of scales too small for float16 by leaving them out."""
    spec = spec_of("symmetric", PerGroup(16), torch.float16)
    weight = heavy(4, 32, 1) * 1e-6
    found = mse_qparams(weight, spec)
    assert found.scales.dtype == torch.float32
    ones = torch.ones(32)
    plain = costs(weight, choose_qparams(weight, spec), spec, ones, 2.0)
    assert costs(weight, found, spec, ones, 2.0).sum() < plain.sum()
    # Half of the groups are just above the limit: no candidate may push them below.
    edge = torch.full((2, 16), 6.2e-5 * 7) * torch.linspace(0.1, 1, 16)
    assert mse_qparams(edge, spec).scales.dtype == torch.float16


@pytest.mark.parametrize("limit", [6.2e-5, 6.5e4], ids=["small", "large"])
@pytest.mark.parametrize("zero", ZEROS)
def test_a_group_at_the_limit_leaves_the_others_alone(zero: str, limit: float) -> None:
    """Catches one group, whose candidates float16 doesn't hold, that ends the search for all."""
    spec, weight = spec_of(zero, PerGroup(16), torch.float16), heavy(64, 64, 5)
    weight[0, :16] = 0
    alone = mse_qparams(weight, spec).scales
    plain = choose_qparams(weight, spec).scales
    steps = spec.format.qmax
    weight[0, 0] = limit * steps
    found = mse_qparams(weight, spec).scales
    assert found.dtype == torch.float16
    assert torch.equal(found[1:], alone[1:])
    assert (found[1:] != plain[1:]).float().mean() > 0.5


def test_output_error_of_a_group() -> None:
    """Catches a block of the Hessian taken from other columns: against e H e one by one."""
    spec = replace(spec_of("integer zero", PerGroup(16)), method="awq")
    weight = heavy(5, 40, 7)
    root = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    hessian = (root @ root.T).double()
    found = search_qparams(weight, spec, hessian_cost(spec, hessian))
    plain = choose_qparams(weight, spec)

    def errors(qparams: QParams) -> Tensor:
        e = (dequantize(quantize(weight, qparams, spec), qparams, spec) - weight).double()
        parts = [slice(0, 16), slice(16, 32), slice(32, 40)]
        return torch.stack([((e[:, p] @ hessian[p, p]) * e[:, p]).sum(1) for p in parts], 1)

    assert bool((errors(found) <= errors(plain) * (1 + 1e-5)).all())
    assert errors(found).sum() < 0.97 * errors(plain).sum()


def test_empty_weights() -> None:
    """Catches minimum and maximum of nothing (bug log 20)."""
    spec = spec_of("symmetric", PerGroup(16))
    assert mse_qparams(torch.zeros(0, 32), spec).scales.shape == (0, 2)
    assert mse_qparams(torch.zeros(3, 0), spec).scales.shape == (3, 0)


def test_bad_arguments() -> None:
    """Catches importances of another layer, negative ones, and a concave norm."""
    spec, weight = spec_of("symmetric", PerGroup(16)), heavy(2, 32, 0)
    for importance in (torch.ones(31), -torch.ones(32), torch.full((32,), torch.nan)):
        with pytest.raises(ValueError, match="importances must be 32"):
            mse_qparams(weight, spec, importance)
    with pytest.raises(ValueError, match="norm"):
        mse_qparams(weight, spec, norm=0.7)
