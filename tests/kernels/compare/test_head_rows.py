"""A few rows of a head, by compiled code and by torch."""

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.compare import sketch_native
from quantwatch_kernels.compare.lens import Readout
from quantwatch_kernels.compare.sketch import head_rows
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.testing import assert_close

HIDDEN, VOCABULARY = 40, 700


def readout(dtype: torch.dtype = torch.float32, **how: float) -> Readout:
    torch.manual_seed(3)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head.weight.data *= 8
    return Readout(nn.RMSNorm(HIDDEN).to(dtype), head.to(dtype), **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["native", "aten", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_head(backend: str, dtype: torch.dtype) -> None:
    """Within half a spacing of the head's dtype of an independent float64 product, and some."""
    r = readout(dtype, scale=0.5, softcap=30.0)
    normed, ids = r.normed(torch.randn(33, HIDDEN)), torch.randint(0, VOCABULARY, (33, 7)).int()
    with prefer(backend):
        found = head_rows(normed, ids, r)
    weight = r.head.weight.double()  # type: ignore[attr-defined]
    products = (weight[ids.long()] * normed.double()[:, None]).sum(-1)
    expected = torch.tanh(0.5 * products / 30.0) * 30.0
    spacing = torch.finfo(dtype).eps
    assert_close(found, expected, rtol=2 * spacing, atol=8 * spacing)
    assert found.dtype == torch.float32
    assert fallbacks() == {}


@pytest.mark.parametrize("width", [1, 63, 64, 65, 576])
def test_native_rows_of_odd_widths(width: int) -> None:
    """Catches lanes beyond a row's end, strides, and a last row that is fetched ahead."""
    torch.manual_seed(1)
    weight = torch.randint(-8, 9, (50, width + 3)).float()[:, :width]
    h, ids = torch.randint(-8, 9, (9, width)).float(), torch.randint(0, 50, (9, 5)).int()
    ids[-1, -1] = 49
    found = sketch_native.native_head_rows(h, ids, weight)
    assert found.tolist() == (weight[ids.long()] * h[:, None]).sum(-1).tolist()


def test_two_threads_share_the_rows() -> None:
    torch.manual_seed(1)
    weight, h = torch.randn(50, 70), torch.randn(9, 70)
    ids = torch.randint(0, 50, (9, 5)).int()
    before = torch.get_num_threads()
    alone = sketch_native.native_head_rows(h, ids, weight)
    torch.set_num_threads(2)
    try:
        assert sketch_native.native_head_rows(h, ids, weight).tolist() == alone.tolist()
    finally:
        torch.set_num_threads(before)


class _Own(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        logits: Tensor = self.inner(h)
        return logits


def _biased() -> Readout:
    head = nn.Linear(HIDDEN, VOCABULARY)
    return Readout(nn.Identity(), head)


FALLBACKS = {
    "a bias": (_biased, "aten", "the head is more than a product"),
    "a module of its own": (lambda: Readout(nn.Identity(), _Own(nn.Linear(HIDDEN, VOCABULARY, bias=False))), "reference", "not a plain linear layer"),
    "float16": (lambda: readout(torch.float16), "aten", "no rows of torch.float16"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "used", "reason"), FALLBACKS.values(), ids=FALLBACKS)
def test_other_heads_fall_back_and_are_counted(build: object, used: str, reason: str) -> None:
    """Catches a bias that is left out."""
    torch.manual_seed(0)
    r: Readout = build()  # type: ignore[operator]
    normed = r.normed(torch.randn(5, HIDDEN))
    ids = torch.randint(0, VOCABULARY, (5, 6)).int()
    found = head_rows(normed, ids, r)
    assert_close(found, r.head_logits(normed).gather(1, ids.long()), rtol=2e-3, atol=2e-3)
    ((counted, times),) = fallbacks().items()
    assert (counted.op, counted.wanted, counted.used, times) == ("head_rows", "native", used, 1)
    assert reason in counted.reason


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sketch_native, "_why_not_built", lambda: "sketch.cpp can't be built: no g++"
    )
    r = readout()
    normed, ids = r.normed(torch.randn(5, HIDDEN)), torch.randint(0, VOCABULARY, (5, 6)).int()
    assert_close(
        head_rows(normed, ids, r), r.head_logits(normed).gather(1, ids.long()), rtol=1e-5, atol=1e-5
    )
    ((counted, _),) = fallbacks().items()
    assert (counted.used, counted.reason) == ("aten", "sketch.cpp can't be built: no g++")
