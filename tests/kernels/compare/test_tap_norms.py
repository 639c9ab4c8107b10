"""The norms behind the statistics of hidden states, by compiled code and by torch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.compare import tap, tap_native
from quantwatch_kernels.compare.tap import TapNorms, tap_norms
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.testing import VIEWS, assert_close

BACKENDS = ("native", "aten")
NAN, INF = math.nan, math.inf


def norms(backend: str, h: Tensor, other: Tensor) -> TapNorms:
    with prefer(backend):
        found = tap_norms(h, other)
    assert fallbacks() == {}
    return found


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 576])
@pytest.mark.parametrize("scale", [2.0**-100, 1.0, 2.0**100])
def test_equals_float64(backend: str, width: int, scale: float) -> None:
    """Catches lanes beyond a row's end, and squares that leave float32."""
    torch.manual_seed(2)
    h = scale * torch.randn(9, width)
    other = h + 1e-3 * scale * torch.randn(9, width)
    a, b = h.double() / scale, other.double() / scale
    expected = (*(x.square().sum(-1).sqrt() for x in (a, a - b, b)), b.amax(-1), b.amin(-1))
    for found, truth in zip(norms(backend, h, other), expected, strict=True):
        assert_close(found / scale, truth, rtol=1e-14, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reference", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("candidate", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_lose_nothing(
    backend: str, reference: torch.dtype, candidate: torch.dtype
) -> None:
    """Catches 16 bits that are read as others, and a difference that is taken in them."""
    torch.manual_seed(3)
    h = torch.randn(9, 100).to(reference)
    other = (h.float() + 1e-2 * torch.randn(9, 100)).to(candidate)
    expected = norms(backend, h.float(), other.float())
    for found, truth in zip(norms(backend, h, other), expected, strict=True):
        assert found.tolist() == truth.tolist()


ODD = {
    "no number": ([NAN, 1.0], (NAN, NAN, NAN, NAN)),
    "no number at last": ([1.0, NAN], (NAN, NAN, NAN, NAN)),
    "infinite": ([INF, 1.0], (INF, INF, INF, 1.0)),
    "minus infinity": ([-INF, 1.0], (INF, INF, 1.0, -INF)),
    "both infinities": ([-INF, INF], (INF, INF, INF, -INF)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ODD)
def test_odd_rows(backend: str, dtype: torch.dtype, case: str) -> None:
    """Catches a maximum that loses a NaN, and one that spreads to the neighbours."""
    other, expected = ODD[case]
    h = torch.tensor([[3.0, 4.0], [3.0, 4.0], [3.0, 4.0]])
    found = norms(backend, h, torch.tensor([[3.0, 4.0], other, [4.0, 3.0]], dtype=dtype))
    assert found.reference.tolist() == [5.0, 5.0, 5.0]
    for column, value in zip(found[1:], expected, strict=True):
        assert str(column[1].item()) == str(value)
        assert column[[0, 2]].isfinite().all()
    assert found.difference[0] == 0


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_itself_alone(
    monkeypatch: pytest.MonkeyPatch, view: str, num_threads: int, dtype: torch.dtype
) -> None:
    """Catches strides that are taken for widths, and rows that two threads share."""
    monkeypatch.setattr(tap_native, "_LEAST", 1)
    torch.manual_seed(2)
    h, other = VIEWS[view](torch.randn(40, 96)), VIEWS[view](torch.randn(40, 96).to(dtype))
    with threads(num_threads):
        whole = norms("native", h, other)
    alone = [norms("native", h[i : i + 1].clone(), other[i : i + 1].clone()) for i in range(len(h))]
    for name in TapNorms._fields:
        expected = [getattr(each, name).item() for each in alone]
        assert getattr(whole, name).tolist() == expected


def test_who_computes_other_dtypes() -> None:
    """Not a fallback: nobody promised compiled code for float64."""
    h = torch.randn(3, 8, dtype=torch.float64)
    assert tap_norms(h, h).difference.tolist() == [0.0] * 3
    assert fallbacks() == {}


def test_no_compiler_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    h, other = torch.randn(3, 8), torch.randn(3, 8)
    expected = norms("aten", h, other)
    monkeypatch.setattr(tap, "why_not_passed", lambda: "no compiler")
    assert tap_norms(h, other).difference.tolist() == expected.difference.tolist()
    assert [(f.op, f.wanted, f.used, f.reason) for f in fallbacks()] == [
        ("tap_norms", "native", "aten", "no compiler")
    ]
