"""The lens in Triton: in the interpreter on a CPU, compiled on a GPU.

Shapes, dtypes and layouts against float64 are the conformance grid's; here is what it can't say.
"""

from pathlib import Path

import pytest
import torch
from tests.kernels.compiling import compiled
from tests.kernels.quantize.triton.helpers import DTYPES, device, guarded_outputs, surrounded
from torch import Tensor, nn

from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.lens import LENS, Readout
from quantwatch_kernels.compare.triton import lens as kernel
from quantwatch_kernels.registry import fallbacks
from quantwatch_kernels.testing import assert_close

pytestmark = [] if device() == "cpu" else [pytest.mark.gpu]
HIDDEN = 24


def on_a_grid(vocabulary: int, sure: float = 1.0, rows: int = 5) -> tuple[Tensor, Tensor, Readout]:
    """States and a head whose products are exact in float32, in whatever order they are summed."""
    torch.manual_seed(vocabulary)
    head = nn.Linear(HIDDEN, vocabulary, bias=False)
    weight = torch.randint(-32, 33, (vocabulary, HIDDEN)) / 64
    weight[vocabulary // 2] *= sure
    head.weight = nn.Parameter(weight)
    h = torch.randint(-64, 65, (rows, HIDDEN)) / 32
    other = h + 2.0**-6 * torch.randint(-8, 9, (rows, HIDDEN))
    return h.to(device()), other.to(device()), Readout(nn.Identity(), head.to(device()))


def check(h: Tensor, other: Tensor, readout: Readout, rtol: float = 2e-6) -> None:
    with torch.no_grad():
        found = LENS.run("triton", h, other, readout, 64)
        z, y = readout.logits(h).double(), readout.logits(other).double()
    exact = compare_exactly(z, y).kl
    assert_close(found.kl, exact, rtol=rtol, atol=1e-7 * exact.mean().item() + 1e-18)
    top, ids = z.sort(dim=-1, descending=True, stable=True)
    gaps = (top - y.gather(-1, ids)).abs()
    assert_close(found.topk_logit_deviation_k5, gaps[:, :5].mean(-1), rtol=rtol, atol=1e-12)
    assert_close(found.topk_logit_deviation_k3, gaps[:, :3].mean(-1), rtol=rtol, atol=1e-12)
    assert fallbacks() == {}


@pytest.mark.parametrize("sure", [1.0, 8.0], ids=["spread", "sure"])
@pytest.mark.parametrize("vocabulary", [1, 3, 63, 64, 65, 130, 200])
def test_equals_the_definition(
    vocabulary: int, sure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches parts that aren't moved to one maximum and centre, and ends of blocks and parts."""
    check(*on_a_grid(vocabulary, sure))
    monkeypatch.setattr(kernel, "_MIN_IDS", 64)
    check(*on_a_grid(vocabulary, sure))


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "soft-capped"])
def test_scale_cap_and_cut(softcap: float | None) -> None:
    """Catches a readout of which a part is left out. A tanh of its own rounds otherwise."""
    h, other, plain = on_a_grid(90)
    readout = Readout(plain.norm, plain.head, 0.25, softcap, width=70)
    check(h, other, readout, rtol=2e-6 if softcap is None else 2e-4)


def test_ties_are_ranked_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches equal logits of which a later one displaces an earlier one."""
    monkeypatch.setattr(kernel, "_MIN_IDS", 64)
    h, other, readout = on_a_grid(150)
    assert isinstance(readout.head, nn.Linear)
    with torch.no_grad():
        readout.head.weight.copy_(readout.head.weight[torch.arange(150) % 4])
        readout.head.weight += torch.arange(150, device=device())[:, None] * 0.0
    other = other + 0.0
    with torch.no_grad():
        found = LENS.run("triton", h, other, readout, 64)
        wanted = LENS.run("reference", h, other, readout, 64)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poisoned_surroundings(dtype: torch.dtype) -> None:
    """Catches a tail that is read or written: NaN around each operand, guards behind outputs."""
    h, other, readout = on_a_grid(70)
    assert isinstance(readout.head, nn.Linear)
    weight = surrounded(readout.head.weight.detach().to(dtype))
    pair = surrounded(h.to(dtype)), surrounded(other.to(dtype))
    with guarded_outputs():
        kl, *_ = kernel.fused_sums_triton(pair, weight, kernel.Finish())
    z, y = ((x @ weight.T).double() for x in pair)
    assert_close(kl, compare_exactly(z, y).kl, rtol=1e-5)


# The interpreter's products are numpy's, which warns of 0 · ∞.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, 100.0])
def test_wild_rows_are_left_to_whole_ones(value: float) -> None:
    """Catches a row that float32 sums can't do and that comes out as a number all the same."""
    h, other, readout = on_a_grid(100)
    other[2, 0] = value
    with torch.no_grad():
        found = LENS.run("triton", h, other, readout, 64)
        wanted = LENS.run("aten", h, other, readout, 64)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert_close(a[~a.isnan()], b[~b.isnan()], rtol=1e-5)


def test_no_rows_and_equal_rows() -> None:
    """Catches an empty grid, and rows that are read off although nothing differs."""
    h, _, readout = on_a_grid(10)
    with torch.no_grad():
        assert LENS.run("triton", h[:0], h[:0], readout, 64).kl.shape == (0,)
        assert LENS.run("triton", h, h, readout, 64).kl.tolist() == [0.0] * len(h)
    empty, *_ = kernel.fused_sums_triton((h[:0], h[:0]), h, kernel.Finish())
    assert empty.shape == (0,)


def test_refusals() -> None:
    """Catches a head of another kind that is taken for one product."""
    h, other, readout = on_a_grid(10)
    biased = Readout(nn.Identity(), nn.Linear(HIDDEN, 10).to(device()))
    double = Readout(nn.Identity(), nn.Linear(HIDDEN, 10, bias=False).double().to(device()))
    assert "has a bias" in str(LENS.why_not("triton", h, other, biased, 64))
    assert "not torch.float64" in str(LENS.why_not("triton", h, other, double, 64))
    assert LENS.why_not("triton", h, other, readout, 64) is None


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles(capability: int, tmp_path: Path) -> None:
    """Catches what the interpreter accepts and the compiler doesn't, and products in TF32."""
    found = compiled(
        "tests.kernels.compare.triton.compile_compare", capability, tmp_path, "fp32", "bf16"
    )
    assert set(found) == {
        f"{name} {dtype}" for name in ("lens", "lens, soft-capped") for dtype in ("fp32", "bf16")
    }
    for name, used in found.items():
        if name.endswith("fp32"):
            assert used == [], "float32 products must not become TF32"
        else:
            assert used
            assert all(".f32.bf16.bf16" in each for each in used), used
