"""HQQ: zero points fitted to the weights, where the plain ones are already exact and where not."""

import pytest
import torch
from tests.kernels.quantize.weight_specs import SHARES
from torch import Tensor

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.hqq import hqq, hqq_qparams
from quantwatch_kernels.quantize.qparams import choose_qparams
from quantwatch_kernels.quantize.recipe import (
    Granularity,
    PerGroup,
    WeightSpec,
)


def spec_of(bits: int = 3, granularity: Granularity | None = None) -> WeightSpec:
    fmt = INT_FORMATS[f"uint{bits}"]
    return WeightSpec(fmt, granularity or PerGroup(16), "float", method="hqq")


def weights(rows: int = 12, columns: int = 72, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    return 0.05 * weight * torch.rand(rows, columns, generator=generator) ** -0.3


def groupwise(weight: Tensor, values: Tensor, size: int, power: float) -> Tensor:
    errors = (values.double() - weight.double()).abs() ** power
    return torch.stack([part.sum(1) for part in torch.split(errors, size, 1)], 1)


@pytest.mark.parametrize("share", SHARES)
def test_never_worse_in_its_own_objective(share: str) -> None:
    """Catches the last zero kept instead of the best one, and padding that is counted."""
    spec, weight = spec_of(3, SHARES[share]), weights()
    size = spec.granularity.group_size(72)
    fitted = groupwise(weight, hqq(weight, spec).values, size, 0.7)
    plain = groupwise(weight, quantize_weight(weight, spec).values, size, 0.7)
    if share == "tensor":
        fitted, plain = fitted.sum(), plain.sum()
    assert bool((fitted <= plain * (1 + 1e-4)).all())
    assert fitted.sum() < plain.sum()


def twin(steps: list[float], zero: float, qmax: int) -> float:
    """The published iteration for one group, in Python floats, on weights in steps."""
    best, least, beta = zero, float("inf"), 10.0
    for _ in range(21):
        codes = [min(max(round(w + zero), 0), qmax) for w in steps]
        errors = [w - (q - zero) for w, q in zip(steps, codes, strict=True)]
        cost = sum(abs(e) ** 0.7 for e in errors)
        if cost < least:
            best, least = zero, cost
        shrunk = [
            0.0 if e == 0 else max(0.0, abs(e) - abs(e) ** -0.3 / beta) * (1 if e > 0 else -1)
            for e in errors
        ]
        parts = zip(steps, codes, shrunk, strict=True)
        zero = sum(q - (w - e) for w, q, e in parts) / len(steps)
        beta *= 1.01
    return best


def test_against_the_iteration_in_python() -> None:
    """Catches a wrong sign of the shrunk part, and zeros averaged over the wrong axis."""
    spec, weight = spec_of(), weights(6, 40)
    plain, found = choose_qparams(weight, spec), hqq_qparams(weight, spec)
    assert plain.zeros is not None
    assert found.zeros is not None
    for row in range(6):
        for group in range(3):
            part = weight[row, 16 * group : 16 * group + 16].double()
            steps = (part / plain.scales[row, group].double()).tolist()
            expected = twin(steps, plain.zeros[row, group].item(), 7)
            assert found.zeros[row, group].item() == pytest.approx(expected, abs=2e-4)


def test_the_size_of_weights_does_not_matter() -> None:
    """Catches a shrinkage in absolute units, which does nothing for weights of the usual size."""
    spec, weight = spec_of(), weights()
    small, large = hqq(weight, spec), hqq(weight * 2**12, spec)
    assert torch.equal(small.codes, large.codes)
    assert torch.equal(small.values * 2**12, large.values)


def test_constant_groups_are_exact() -> None:
    """Catches 0/0 for a constant group, and zeros that become something else (bug log 3, 4)."""
    weight = torch.tensor([[0.7] * 16 + [-0.3] * 16 + [0.0] * 16 + [1e-44] * 8])
    values = hqq(weight, spec_of()).values
    assert torch.equal(values[:, :48], weight[:, :48])
    assert values[:, 48:].abs().max() < 1e-40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_zeros_as_they_are_stored(dtype: torch.dtype) -> None:
    """Catches zeros fitted in float32 and rounded afterwards: worse than the plain ones."""
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(16), "float", "none", "hqq", dtype)
    weight = weights()
    found = hqq(weight, spec)
    assert found.qparams.zeros is not None
    assert found.qparams.zeros.dtype == dtype
    fitted = groupwise(weight, found.values, 16, 0.7)
    plain = groupwise(weight, quantize_weight(weight, spec).values, 16, 0.7)
    assert bool((fitted <= plain * (1 + 1e-4)).all())


def test_other_zeros_are_refused() -> None:
    """Catches a float zero that is stored as an integer."""
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(16), "integer")
    with pytest.raises(ValueError, match="float zero"):
        hqq(weights(), spec)
