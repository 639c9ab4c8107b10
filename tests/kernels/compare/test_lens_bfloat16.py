"""The lens whose products are rounded to bfloat16 and summed in float32."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantwatch_kernels.compare import lens_bfloat16, lens_bfloat16_native
from quantwatch_kernels.compare.lens import LensStatistics, Readout, lens_statistics
from quantwatch_kernels.compare.lens_bfloat16 import LENS_BFLOAT16
from quantwatch_kernels.compare.lens_bfloat16_native import why_not_native_bfloat16
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.testing import assert_close

BUILT = why_not_native_bfloat16()
needs_kernel = pytest.mark.skipif(BUILT is not None, reason=str(BUILT))
BACKENDS = [pytest.param("native", marks=needs_kernel), "aten", "reference"]
Matrix = NDArray[np.float64]


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(rows: int, width: int, ids: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Readout]:
    """States and a head with more digits than bfloat16 keeps; sums are exact in float32.

    Sixteen channels of a row are in use, its last one among them.
    """
    h = torch.zeros(rows, width)
    channels = torch.rand(rows, width).topk(min(16, width), dim=-1).indices
    channels[:, 0] = width - 1
    h.scatter_(1, channels, 1 + torch.randint(0, 1024, channels.shape) / 1024)
    difference = (1 + torch.randint(0, 1024, h.shape) / 1024) / 4
    other = h + torch.where(h != 0, difference * torch.randint(-1, 2, h.shape), 0.0)
    weight = (1 + torch.randint(0, 1024, (ids, width)) / 1024) / 4
    return h, other, readout(scale * weight * (2 * torch.randint(0, 2, (ids, width)) - 1))


def readout(weight: Tensor, **settings: float | int) -> Readout:
    ids, width = weight.shape
    head = nn.Linear(width, ids, bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return Readout(nn.Identity(), head, **settings)  # type: ignore[arg-type]


def weight_of(r: Readout) -> Tensor:
    assert isinstance(r.head, nn.Linear)
    return r.head.weight


def rounded(h: Tensor, other: Tensor, r: Readout) -> tuple[Matrix, Matrix]:
    """Both models' logits in float64 from rounded factors; the rounding by its bits, in NumPy."""

    def b(x: Tensor) -> Matrix:
        bits = x.numpy().astype(np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return nearest.view(np.float32).astype(np.float64)

    weight = b(weight_of(r)).T
    z = b(h) @ weight
    return z, z + b(other - h) @ weight


def defined(z: Matrix, y: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """KL and both deviations, from the definitions."""
    log_p, log_q = (x - x.max(-1, keepdims=True) for x in (z, y))
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (log_p, log_q))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    order = np.argsort(-z, axis=-1, kind="stable")[:, :5]
    gaps = np.abs(np.take_along_axis(z - y, order, -1))
    return kl, gaps.mean(-1), gaps[:, :3].mean(-1)


def bfloat16(backend: str, *args: Tensor | Readout) -> LensStatistics:
    with prefer(backend):
        return lens_statistics(*args, products="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [1, 47, 48, 49, 481, 1025])
@pytest.mark.parametrize("width", [1, 2, 31, 576, 577])
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_definition_of_rounded_factors(
    backend: str, rows: int, width: int, ids: int
) -> None:
    """Catches another rounding, ends of widths, panels and tiles, and a difference left out."""
    h, other, r = made(rows, width, ids)
    found = bfloat16(backend, h, other, r)
    kl, *gaps = defined(*rounded(h, other, r))
    assert_close(found.kl, torch.from_numpy(kl), rtol=2e-6, atol=1e-12)
    for ours, right in zip(found[1:], gaps, strict=True):
        assert_close(ours, torch.from_numpy(right), rtol=1e-12)
    assert fallbacks() == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_does_round(backend: str) -> None:
    """Catches float32 products under another name, and rounded ones that are no better than said.

    The difference is 2^-12 of the states: rounded one by one they would have an error of its size.
    """
    torch.manual_seed(1)
    h, r = torch.randn(100, 300), readout(torch.randn(2000, 300) / 4)
    other = h + 2.0**-12 * torch.randn(100, 300)
    exact = lens_statistics(h, other, readout(weight_of(r).double())).kl
    error = (bfloat16(backend, h, other, r).kl / exact - 1).abs()
    assert error.min() > 0
    assert 1e-4 < error.median() < 0.02
    assert error.max() < 0.2


@pytest.mark.parametrize("settings", [{"scale": 0.25}, {"softcap": 3.0}, {"width": 650},
                                      {"scale": 2.0, "softcap": 5.0, "width": 301}])  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_cap_and_cut(backend: str, settings: dict[str, Any]) -> None:
    """Catches what comes after the product being left out, or done to the difference alone."""
    h, other, plain = made(70, 64, 700)
    z, y = (x[:, : settings.get("width")] for x in rounded(h, other, plain))
    scale, cap = settings.get("scale", 1.0), settings.get("softcap", np.inf)
    if np.isfinite(cap):
        z, y = (cap * np.tanh(scale * x / cap) for x in (z, y))
    else:
        z, y = scale * z, scale * y
    found = bfloat16(backend, h, other, readout(weight_of(plain), **settings))
    kl, *gaps = defined(z, y)
    assert_close(found.kl, torch.from_numpy(kl), rtol=2e-5)
    for ours, right in zip(found[1:], gaps, strict=True):
        # A capped logit is a float32 number: near 4 they are 5e-7 apart.
        assert_close(ours, torch.from_numpy(right), rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["reference", "candidate", "both"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_wild_rows_are_read_in_float32(backend: str, side: str, value: float) -> None:
    """Catches NaN from infinity − infinity where float32 has an answer, and rows that spread."""
    h, other, r = made(20, 64, 700)
    plain = bfloat16(backend, h, other, r)
    for x in (h,) * (side != "candidate") + (other,) * (side != "reference"):
        x[7, 3] = value
    found = bfloat16(backend, h, other, r)
    with prefer("aten"):
        exact = lens_statistics(h, other, r)
    for ours, before, right in zip(found, plain, exact, strict=True):
        assert_close(ours[7:8], right[7:8], rtol=1e-6)
        keep = torch.arange(20) != 7
        assert ours[keep].tolist() == before[keep].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_nobody_can_say(backend: str) -> None:
    """Catches −∞ − −∞ for a masked id: in both models it adds nothing."""
    h, other, r = made(9, 64, 700)
    h[:, 5] = other[:, 5] = 1.0
    weight = weight_of(r).clone()
    weight[:, 5] = 0.0
    weight[[3, 699]] = 0.0
    weight[[3, 699], 5] = -torch.inf
    h[:, :5] = other[:, :5] = h[:, 6:] = other[:, 6:] = 0.0
    h[:, 6:12], other[:, 6:12] = torch.rand(9, 6), torch.rand(9, 6)
    masked = readout(weight)
    found = bfloat16(backend, h, other, masked)
    with prefer("reference"):
        exact = lens_statistics(h, other, masked)
    assert exact.kl.isfinite().all()
    assert_close(found.kl, exact.kl, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_layouts(backend: str) -> None:
    """Catches rows and heads read as if they were contiguous."""
    h, other, r = made(33, 64, 500)
    plain = bfloat16(backend, h, other, r)
    weight = weight_of(r)
    larger = torch.full((501, 80), torch.nan)
    larger[:500, :64] = weight
    spread = torch.full((66, 128), torch.nan)
    spread[::2, ::2] = h
    for layout in (weight.t().contiguous().t(), larger[:500, :64]):
        found = bfloat16(backend, spread[::2, ::2], other, readout(layout))
        for ours, right in zip(found, plain, strict=True):
            assert_close(ours, right, rtol=1e-12)


@needs_kernel
@pytest.mark.usefixtures("_one_thread")
def test_threads_and_company_change_no_bit() -> None:
    """Catches panels that two threads write to, and sums whose order depends on other rows."""
    torch.manual_seed(2)
    h, weight = torch.randn(300, 100), torch.randn(3001, 100)
    other, r = h + 0.01 * torch.randn(300, 100), readout(weight)
    torch.set_num_threads(1)
    plain = bfloat16("native", h, other, r)
    for threads in (2, 3, 40):
        torch.set_num_threads(threads)
        found = bfloat16("native", h, other, r)
        assert [x.tolist() for x in found] == [x.tolist() for x in plain]
        torch.set_num_threads(1)
    few = slice(255, 262)
    alone = bfloat16("native", h[few], other[few], r)
    assert [x.tolist() for x in alone] == [x[few].tolist() for x in plain]


@needs_kernel
def test_dense_products_stay_float32_sums() -> None:
    """Catches products rounded to bfloat16, as torch's are: 1e-3 of a logit, all of a small KL."""
    torch.manual_seed(3)
    h, r = torch.randn(64, 577), readout(torch.randn(3000, 577) / 8)
    other = h + 0.02 * torch.randn(64, 577)
    native, twin = (bfloat16(name, h, other, r) for name in ("native", "reference"))
    for ours, right in zip(native, twin, strict=True):
        assert_close(ours, right, rtol=5e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_rows_are_exactly_zero(backend: str) -> None:
    """Catches layers before a fault that aren't exactly 0."""
    h, other, r = made(6, 64, 100)
    other[[0, 4]] = h[[0, 4]]
    kl = bfloat16(backend, h, other, r).kl
    assert kl.nonzero().flatten().tolist() == [1, 2, 3, 5]
    assert bfloat16(backend, h[:0], other[:0], r).kl.shape == (0,)


@needs_kernel
@pytest.mark.usefixtures("_one_thread")
def test_memory_does_not_grow_with_rows_or_ids() -> None:
    """Catches a rounded copy of the head, and tensors of tokens × vocabulary."""
    torch.set_num_threads(1)

    def held(rows: int, ids: int) -> int:
        workspace.clear()
        h, other, r = made(rows, 64, ids)
        bfloat16("native", h, other, r)
        return sum(buffer.numel() for buffer in workspace._buffers.values())

    pairs = lens_bfloat16_native.PAIRS
    assert held(pairs, 1000) == held(pairs * 3, 20_000) < 2 * pairs * (1000 + 64)


def test_without_the_instructions_the_rounding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches another precision than was asked for, and a slow lens that nobody is told of."""
    h, other, r = made(40, 64, 700)
    monkeypatch.setattr(lens_bfloat16, "why_not_native_bfloat16", lambda: "no avx512_bf16")
    found = lens_statistics(h, other, r, products="bfloat16")
    kl, *_ = defined(*rounded(h, other, r))
    assert_close(found.kl, torch.from_numpy(kl), rtol=2e-6)
    (told,) = fallbacks()
    assert told == ("lens_bfloat16", "native", "aten", "no avx512_bf16")


@needs_kernel
def test_a_cpu_without_the_instructions_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a library that has no kernel and is called all the same."""
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: str(tmp_path))
    monkeypatch.setenv("CXX", "g++ -mno-avx512bf16")
    assert "no avx512_bf16" in str(why_not_native_bfloat16.__wrapped__())


HEADS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bias": (lambda: nn.Linear(8, 33), "it has a bias"),
    "bfloat16": (lambda: nn.Linear(8, 33, bias=False, dtype=torch.bfloat16), "is torch.bfloat16"),
    "module": (lambda: nn.Sequential(nn.Linear(8, 33, bias=False)), "the head is a Sequential"),
}


@pytest.mark.parametrize("name", HEADS)
def test_other_heads_are_refused(name: str) -> None:
    """Catches a head whose products are taken in a precision that nobody asked for."""
    head, reason = HEADS[name]
    pair = torch.zeros(2, 8), torch.ones(2, 8)
    with pytest.raises(ValueError, match=reason):
        lens_statistics(*pair, Readout(nn.Identity(), head()), products="bfloat16")
    why = LENS_BFLOAT16.why_not("native", *pair, Readout(nn.Identity(), head()), 64)
    assert reason in str(why)
