"""Facts about number formats, and the tools that tests rely on."""

import math
import sys

import numpy as np
import pytest
import torch

from quantwatch_kernels.compare.workspace import rows_per_chunk, workspace
from quantwatch_kernels.numerics import fit_polynomial, horner, relative_rmse, spacing
from quantwatch_kernels.testing import assert_close, poison_empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_spacing_is_numpys(dtype: torch.dtype) -> None:
    """Catches a step that is wrong by two at powers of two, or for subnormals."""
    values = torch.tensor([1.0, 1.5, 2.0, -3.9, 1000.0, 6e-5, 1e-7, 0.0]).to(dtype)
    expected = torch.from_numpy(np.spacing(values.abs().numpy()).astype(np.float64))
    assert torch.equal(spacing(values, dtype), expected)


def test_spacing_of_bfloat16() -> None:
    """Catches float32's step used for a bfloat16 head: they differ by 65,536."""
    assert spacing(torch.tensor([2.0, 3.9, 4.0]), torch.bfloat16).tolist() == [2**-6, 2**-6, 2**-5]
    assert math.isnan(spacing(torch.tensor([math.inf]), torch.float32).item())


def test_polynomial() -> None:
    """Catches coefficients in the wrong order."""
    coefficients = fit_polynomial(np.exp, 0.5, 7)
    x = torch.linspace(-0.5, 0.5, 101)
    y = horner(tuple(torch.tensor(c) for c in coefficients), x, torch.empty_like(x))
    assert_close(y, x.double().exp(), rtol=2e-7)
    with pytest.raises(ValueError, match="odd"):
        fit_polynomial(np.exp, 1.0, 4)


def test_relative_rmse() -> None:
    """Catches 0/0, and an error against nothing that reads as small."""
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_rmse(zero, zero) == 0
    assert relative_rmse(one, zero) == math.inf
    assert relative_rmse(1.5 * one, one) == pytest.approx(0.5)


def test_assert_close_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a comparison that accepts NaN, or the wrong shape."""
    one = torch.ones(3)
    assert_close(one, one + 1e-9, rtol=1e-6)
    assert "RMS ratio" in capsys.readouterr().out
    assert_close(torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf]), rtol=0)
    for bad in (one + 1e-3, one * math.nan, torch.ones(2), one * math.inf):
        with pytest.raises(AssertionError):
            assert_close(bad, one, rtol=1e-6)


def test_poisoned_memory() -> None:
    """Catches a poison that spares everyone, or poisons torch itself."""
    assert torch.empty(3).shape == (3,)
    with poison_empty(__name__.split(".")[0]):
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2)).isnan().all()
        assert torch.ones(2).new_empty(2).isnan().all()
        assert torch.empty(2, dtype=torch.int8).tolist() == [85, 85]
    assert workspace.take("new", 2, 3, torch.device("cpu")).isnan().all()
    assert __name__ in sys.modules


def test_workspace_is_reused() -> None:
    """Catches memory that grows with every call."""
    device = torch.device("cpu")
    first = workspace.take("a", 4, 8, device)
    assert workspace.take("a", 2, 16, device).data_ptr() == first.data_ptr()
    assert workspace.take("b", 4, 8, device).data_ptr() != first.data_ptr()
    with torch.inference_mode():
        grown = workspace.take("a", 40, 80, device)
    assert not grown.is_inference()
    assert rows_per_chunk(1 << 30) == 1
