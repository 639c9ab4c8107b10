"""The lens's own float32 products: as precise for small differences as for large ones."""

from pathlib import Path

import platformdirs
import pytest
import torch
from tests.kernels.compare.heads import readout, weight_of
from torch import Tensor

from quantwatch_kernels.compare import lens, lens_words_native
from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.lens import Readout, lens_kl, lens_statistics
from quantwatch_kernels.compare.lens_words_native import PAIRS, products, suits_cpu, why_not_words
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.testing import assert_close

REASON = why_not_words("float32")
NEEDS_WORDS = pytest.mark.skipif(REASON is not None, reason=str(REASON))
FUSED = pytest.mark.parametrize("way", [pytest.param("native", marks=NEEDS_WORDS), "pieces"])


def made(rows: int, width: int, ids: int, drift: float) -> tuple[Tensor, Tensor, Readout]:
    torch.manual_seed(1)
    h, weight = torch.randn(rows, width), 3 * torch.randn(ids, width) / width**0.5
    return h, h + drift * torch.randn(rows, width), readout(weight)


def exact(h: Tensor, other: Tensor, r: Readout) -> Tensor:
    """KL of products in float64."""
    z, y = (x.double() @ weight_of(r).double().t() for x in (h, other))
    return compare_exactly(z, y).kl


@pytest.mark.parametrize("drift", [1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("width", [16, 577])
@FUSED
def test_small_differences_are_as_right_as_large_ones(way: str, width: int, drift: float) -> None:
    """Catches two products that cancel: at 1e-5 a KL of them is wrong altogether."""
    h, other, r = made(200, width, 3000, drift)
    with prefer(way):
        kl = lens_kl(h, other, r)
    right = exact(h, other, r)
    error = (kl / right - 1).abs()
    assert error.median() < 2e-6
    assert error.max() < 4e-5
    assert abs(float(kl.mean() / right.mean()) - 1) < 5e-7
    assert fallbacks() == {}


@pytest.mark.parametrize("width", [2048, 8192])
@FUSED
def test_wide_heads_are_as_right(way: str, width: int) -> None:
    """Catches one sum along the whole width, whose rounding grows with it: 7e-5 at 8,192."""
    torch.manual_seed(2)
    h, weight = torch.randn(32, width).abs(), 3 * torch.randn(2000, width) / width**0.5 + 0.05
    other, r = h * (1 + 1e-3 * torch.randn(32, width)), readout(weight)
    with prefer(way):
        error = (lens_kl(h, other, r) / exact(h, other, r) - 1).abs()
    assert error.median() < 1.5e-5
    assert error.max() < 2e-4


@pytest.mark.parametrize("moved", [-1.0, 0.01, 8.0, 10.0, 30.0, 39.0])
@pytest.mark.parametrize("sureness", [2.0, 20.0], ids=["flat", "sure"])
@FUSED
def test_one_id_that_moves_against_all_others(way: str, sureness: float, moved: float) -> None:
    """Catches a centre on that id: of a row that is sure of nothing every term is then e^-x − 1."""
    torch.manual_seed(3)
    ids = 50_000
    logits = torch.rand(ids) * 2
    logits[ids // 3] = sureness
    weight = torch.stack([logits, torch.zeros(ids)], dim=1)
    weight[ids // 3, 1] = 1.0
    h, other, r = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, moved]]), readout(weight)
    with prefer(way):
        kl = lens_kl(h, other, r)
    assert_close(kl, exact(h, other, r), rtol=2e-6)


@pytest.mark.parametrize("moved", [-20.0, -2.0, 0.3, 10.0, 20.0])
@pytest.mark.parametrize("first", [1, 480, 25_000, 49_000])
@FUSED
def test_ids_that_move_together_from_one_on(way: str, first: int, moved: float) -> None:
    """Catches a centre that fits the first piece alone, and sums that lose their digits to moving."""
    torch.manual_seed(4)
    logits = torch.rand(50_000) * 2
    logits[0] = 2.5  # no likelier one comes later
    weight = torch.stack([logits, (torch.arange(50_000) >= first).float()], dim=1)
    h, other, r = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, moved]]), readout(weight)
    with prefer(way):
        kl = lens_kl(h, other, r)
    assert_close(kl, exact(h, other, r), rtol=2e-6)


@FUSED
def test_what_was_impossible_and_is_likely(way: str) -> None:
    """Catches ids below e^-87 that are left out though the candidate lifts them by as much."""
    weight = torch.zeros(50_000, 2)
    weight[:, 1] = 1.0
    weight[0] = torch.tensor([1.0, 0.0])
    r = readout(weight)
    for lift in (-29.0, -40.0, -60.0):
        h, other = torch.tensor([[0.0, -88.0]]), torch.tensor([[0.0, lift]])
        with prefer(way):
            kl = lens_kl(h, other, r)
        assert_close(kl, exact(h, other, r), rtol=1e-5, atol=1e-15)


@pytest.mark.parametrize("size", [1.0, 30.0, 200.0])
@FUSED
def test_a_cap_that_saturates(way: str, size: float) -> None:
    """Catches differences of capped logits, which cancel, and those of saturated ones, which vanish."""
    h, other, plain = made(40, 64, 2000, 1e-3)
    r = readout(size * weight_of(plain) / 9, softcap=30.0)
    z, y = (x.double() @ weight_of(r).double().t() for x in (h, other))
    right = compare_exactly(*(30 * torch.tanh(x / 30) for x in (z, y))).kl
    with prefer(way):
        error = (lens_kl(h, other, r) / right - 1).abs()
    assert error.median() < 1e-5
    assert error.max() < 2e-4


@pytest.mark.parametrize("ids", [1, 15, 16, 47, 48, 49, 481])
@pytest.mark.parametrize("width", [1, 2, 15, 17, 31, 32, 33, 576])
@pytest.mark.parametrize("rows", [1, 3, 130])
@NEEDS_WORDS
def test_products_are_those_of_the_definition(rows: int, width: int, ids: int) -> None:
    """Catches ends of widths, panels and tiles, and a difference left out."""
    h, other, r = made(rows, width, ids, 0.1)
    weight = weight_of(r)
    found = torch.cat([x.clone() for x in products((h, other), weight, "float32")], dim=1)
    both = torch.cat([h, other - h]).double()
    size = both.abs() @ weight.double().abs().t()
    assert found.shape == (2 * rows, ids)
    assert ((found - both @ weight.double().t()).abs() <= 4e-7 * size).all()


@NEEDS_WORDS
@pytest.mark.usefixtures("one_thread")
def test_threads_and_company_change_no_bit() -> None:
    """Catches panels that two threads write to, and sums whose order depends on other rows."""
    h, other, r = made(300, 100, 3001, 0.01)
    plain = lens_statistics(h, other, r)
    for threads in (2, 3, 40):
        torch.set_num_threads(threads)
        assert [x.tolist() for x in lens_statistics(h, other, r)] == [x.tolist() for x in plain]
    torch.set_num_threads(1)
    few = slice(255, 262)
    alone = lens_statistics(h[few], other[few], r)
    assert [x.tolist() for x in alone] == [x[few].tolist() for x in plain]


@NEEDS_WORDS
def test_memory_layouts() -> None:
    """Catches rows and heads read as if they were contiguous."""
    h, other, r = made(33, 64, 500, 0.1)
    plain, weight = lens_kl(h, other, r), weight_of(r)
    larger = torch.full((501, 80), torch.nan)
    larger[:500, :64] = weight
    spread = torch.full((66, 128), torch.nan)
    spread[::2, ::2] = h
    for layout in (weight.t().contiguous().t(), larger[:500, :64]):
        assert lens_kl(spread[::2, ::2], other, readout(layout)).tolist() == plain.tolist()


@NEEDS_WORDS
@pytest.mark.usefixtures("one_thread")
def test_memory_does_not_grow_with_rows_or_ids() -> None:
    """Catches a turned copy of the head, and tensors of tokens × vocabulary."""

    def held(rows: int, ids: int) -> int:
        workspace.clear()
        lens_kl(*made(rows, 64, ids, 0.1))
        return sum(buffer.numel() for buffer in workspace._buffers.values())

    assert held(PAIRS, 1000) == held(PAIRS * 3, 20_000) < 2 * PAIRS * (1000 + 64)


def test_without_the_instructions_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches other numbers on another processor; torch's products are no fallback there."""
    h, other, r = made(40, 64, 3000, 1e-3)
    usual = lens_statistics(h, other, r)
    monkeypatch.setattr(lens, "why_not_words", lambda factors: f"no {factors} here")
    monkeypatch.setattr(lens, "suits_cpu", lambda _: False)
    for ours, found in zip(lens_statistics(h, other, r), usual, strict=True):
        assert_close(ours, found, rtol=1e-5)
    assert fallbacks() == {}


@NEEDS_WORDS
def test_products_that_cannot_be_built_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a lens of twice the time that nobody is told of."""
    h, other, r = made(40, 64, 3000, 1e-3)
    monkeypatch.setattr(lens, "why_not_words", lambda _: "can't be built: a compiler's error")
    lens_statistics(h, other, r)
    assert list(fallbacks()) == [
        ("lens_statistics", "native", "pieces", "can't be built: a compiler's error")
    ]


@NEEDS_WORDS
def test_a_cpu_without_the_instructions_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a library that has no kernel and is called all the same."""
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: str(tmp_path))
    monkeypatch.setattr(lens_words_native, "suits_cpu", suits_cpu.__wrapped__)
    monkeypatch.setenv("CXX", "g++ -mno-avx512f")
    assert "no avx512f" in str(why_not_words.__wrapped__("float32"))
