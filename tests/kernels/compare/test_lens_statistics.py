"""Hidden states read off through one readout."""

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.compare import lens
from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.lens import Readout, lens_kl, lens_statistics
from quantwatch_kernels.compare.lens_native import COLUMNS, PAIRS
from quantwatch_kernels.compare.lens_words_native import why_not_words
from quantwatch_kernels.compare.rounding import Factors
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.testing import assert_close

HIDDEN, VOCABULARY = 32, 700
NO_WORDS = why_not_words("float32")
FUSED = pytest.mark.parametrize(
    "way",
    [
        pytest.param("native", marks=pytest.mark.skipif(bool(NO_WORDS), reason=str(NO_WORDS))),
        "pieces",
    ],
)


def readout(**settings: float | int) -> Readout:
    torch.manual_seed(3)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    return Readout(nn.RMSNorm(HIDDEN), head, **settings)  # type: ignore[arg-type]


READOUTS = {
    "plain": readout(),
    "scaled": readout(scale=0.25),
    "soft-capped": readout(softcap=3.0),
    "cut": readout(width=650),
    "all": readout(scale=2.0, softcap=5.0, width=300),
}


def in_float64(r: Readout, h: Tensor) -> Tensor:
    """Logits that are float64 from the norm on."""
    assert isinstance(r.head, nn.Linear)
    with torch.no_grad():
        z = r.scale * (r.normed(h).double() @ r.head.weight[: r.width].double().t())
    return z if r.softcap is None else r.softcap * torch.tanh(z / r.softcap)


def states(rows: int, drift: float) -> tuple[Tensor, Tensor]:
    h = torch.randn(rows, HIDDEN)
    return h, h + drift * torch.randn(rows, HIDDEN)


@pytest.mark.parametrize("drift", [1e-4, 0.05, 3.0])
@pytest.mark.parametrize("name", READOUTS)
def test_equals_the_definition(name: str, drift: float) -> None:
    """Catches soft-capping or a scale that is left out of one of the two paths."""
    r, (h, other) = READOUTS[name], states(100, drift)
    with prefer("aten"):
        result = lens_statistics(h, other, r, chunk=33)
    z, y = (torch.cat([r.logits(part) for part in torch.split(x, 33)]).double() for x in (h, other))
    p = z.softmax(-1)
    kl = (p * (z.log_softmax(-1) - y.log_softmax(-1))).sum(-1)
    assert_close(result.kl, kl, rtol=1e-4, atol=1e-6 * kl.mean().item() + 1e-15, what="kl")
    top, ids = z.topk(5)
    deviation = (top - y.gather(-1, ids)).abs()
    assert_close(result.topk_logit_deviation_k5, deviation.mean(-1), rtol=1e-9)
    assert_close(result.topk_logit_deviation_k3, deviation[:, :3].mean(-1), rtol=1e-9)
    with prefer("reference"):
        twin = lens_statistics(h, other, r)
    with prefer("aten"):
        # The twin multiplies all rows at once; so must we, for the same rounding of the logits.
        whole = lens_statistics(h, other, r, chunk=100)
    for a, b in zip(whole, twin, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-6 * b.mean().item() + 1e-15)


@pytest.mark.parametrize("drift", [0.05, 3.0])
@pytest.mark.parametrize("name", READOUTS)
@FUSED
def test_pieces_equal_the_definition(way: str, name: str, drift: float) -> None:
    """Catches a norm, scale, soft-cap or cut that is left out where ids come in pieces."""
    r, (h, other) = READOUTS[name], states(100, drift)
    with prefer(way):
        result = lens_statistics(h, other, r)
    z, y = (in_float64(r, x) for x in (h, other))
    assert_close(result.kl, compare_exactly(z, y).kl, rtol=2e-5, what="kl")
    top, ids = z.topk(5)
    deviation = (top - y.gather(-1, ids)).abs()
    assert_close(result.topk_logit_deviation_k5, deviation.mean(-1), rtol=2e-5)
    assert_close(result.topk_logit_deviation_k3, deviation[:, :3].mean(-1), rtol=2e-5)
    assert fallbacks() == {}


def on_a_grid(
    rows: int, vocabulary: int, drift: float, sure: float
) -> tuple[Tensor, Tensor, Readout]:
    """States and a head whose products are exact in float32, in whatever order they are summed."""
    head = nn.Linear(HIDDEN, vocabulary, bias=False)
    weight = torch.randint(-32, 33, (vocabulary, HIDDEN)) / 64
    weight[vocabulary // 2] *= sure  # one id that most rows are sure of
    head.weight = nn.Parameter(weight)
    h = torch.randint(-64, 65, (rows, HIDDEN)) / 32
    return h, h + drift * torch.randint(-8, 9, (rows, HIDDEN)), Readout(nn.Identity(), head)


@pytest.mark.parametrize("sure", [1.0, 8.0], ids=["spread", "sure"])
@pytest.mark.parametrize("drift", [2.0**-12, 2.0**-6, 0.25])
@pytest.mark.parametrize("vocabulary", [1, 3, 17, 700, 1024, 1025, 5000])
@pytest.mark.parametrize("rows", [1, 3, 130])
@FUSED
def test_pieces_equal_whole_rows(
    way: str, rows: int, vocabulary: int, drift: float, sure: float
) -> None:
    """Catches sums that don't move to a likelier id as they should, and ends of pieces."""
    h, other, r = on_a_grid(rows, vocabulary, drift, sure)
    with prefer(way):
        result = lens_statistics(h, other, r)
    z, y = r.logits(h).double(), r.logits(other).double()
    exact = compare_exactly(z, y)
    assert_close(result.kl, exact.kl, rtol=2e-6, atol=1e-7 * exact.kl.mean().item() + 1e-18)
    top, ids = z.sort(dim=-1, descending=True, stable=True)
    gaps = (top - y.gather(-1, ids)).abs()
    assert_close(result.topk_logit_deviation_k5, gaps[:, :5].mean(-1), rtol=1e-12)
    assert_close(result.topk_logit_deviation_k3, gaps[:, :3].mean(-1), rtol=1e-12)
    assert fallbacks() == {}


@pytest.mark.parametrize(
    ("common", "drift"),
    [(0.0, 2.0**-8), (64.0, 2.0**-8), (-4096.0, 2.0**-5)],
    ids=["no shift", "shift 64", "shift -4096"],
)
@FUSED
def test_pieces_ignore_what_all_ids_share(way: str, common: float, drift: float) -> None:
    """Catches digits lost to a constant that the softmax doesn't see.

    Every difference is a float32 number still: beside 4,096 those of 2^-8 states aren't.
    """
    h, other, r = on_a_grid(40, 3000, drift, 1.0)
    head = nn.Linear(HIDDEN + 1, 3000, bias=False)
    assert isinstance(r.head, nn.Linear)
    head.weight = nn.Parameter(torch.cat([r.head.weight.detach(), torch.ones(3000, 1)], dim=1))
    h, other = (
        torch.cat([x, torch.full((40, 1), c)], dim=1) for x, c in ((h, 0.0), (other, common))
    )
    r = Readout(nn.Identity(), head)
    with prefer(way):
        kl = lens_kl(h, other, r)
    exact = compare_exactly(in_float64(r, h), in_float64(r, other)).kl
    assert_close(kl, exact, rtol=2e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, 100.0])
@FUSED
def test_pieces_leave_wild_rows_to_whole_ones(way: str, value: float) -> None:
    """Catches a row that float32 sums can't do and that comes out as a number all the same."""
    h, other, r = on_a_grid(5, 1500, 2.0**-6, 1.0)
    other[2, 0] = value
    for backend in (way, "aten"):
        with prefer(backend):
            found = lens_statistics(h, other, r)
        if backend == way:
            ours = found
    for a, b in zip(ours, found, strict=True):
        assert_close(a, b, rtol=1e-5)


def test_readout_by_hand() -> None:
    """Catches the order norm, head, scale, soft-cap, cut being changed."""
    r = READOUTS["all"]
    h = torch.randn(2, HIDDEN)
    assert isinstance(r.head, nn.Linear)
    raw = nn.functional.rms_norm(h, (HIDDEN,)) @ r.head.weight.T
    expected = (5 * torch.tanh(2 * raw / 5))[:, :300]
    assert_close(r.logits(h), expected, rtol=1e-5, atol=1e-6)
    assert_close(r.head_logits(r.norm(h)), r.logits(h), rtol=0)


def test_low_precision_readout_gives_float32() -> None:
    """Catches float32 hidden states that a bfloat16 head refuses, and logits left in bfloat16."""
    r = Readout(
        nn.RMSNorm(HIDDEN).bfloat16(), nn.Linear(HIDDEN, 50, bias=False).bfloat16(), softcap=30.0
    )
    assert r.logits(torch.randn(3, HIDDEN)).dtype == torch.float32


@pytest.mark.parametrize("head", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_may_have_another_dtype_than_the_head(norm: torch.dtype, head: torch.dtype) -> None:
    """Catches a back end that multiplies what the norm returns as it is: norms kept in float32."""
    linear = nn.Linear(HIDDEN, 40, bias=False).to(head)
    r = Readout(lambda x: (x * 2).to(norm), linear)
    h, other = states(4, 0.1)
    found = lens_kl(h, other, r)
    assert not fallbacks()
    expected = compare_exactly(r.logits(h), r.logits(other)).kl
    assert_close(found, expected, rtol=1e-4, atol=1e-9)


def test_equal_states_are_exactly_zero_and_free() -> None:
    """Catches layers before the fault that aren't exactly 0, and matrix products nobody needs."""
    calls = []

    def head(h: Tensor) -> Tensor:
        calls.append(len(h))
        return h

    h = torch.randn(6, HIDDEN)
    other = h.clone()
    other[4] += 0.1
    result = lens_statistics(h, other, Readout(lambda x: x, head))
    assert result.kl.nonzero().flatten().tolist() == [4]
    assert result.topk_logit_deviation_k5.nonzero().flatten().tolist() == [4]
    assert calls == [1, 1]


def test_nan_stays_in_its_row() -> None:
    """Catches a NaN state that is taken for an equal one, or spreads."""
    h, other = states(3, 0.1)
    h[1, 0] = other[1, 0] = torch.nan
    kl = lens_kl(h, other, READOUTS["plain"])
    assert kl.isnan().tolist() == [False, True, False]
    assert fallbacks() == {}


def test_no_rows() -> None:
    """Catches a crash when no position was sampled."""
    assert lens_kl(*states(0, 0.1), READOUTS["plain"]).shape == (0,)


@pytest.mark.parametrize("products", ["float32", "int16", "bfloat16"])
@pytest.mark.parametrize("width", [HIDDEN - 8, HIDDEN + 8])
def test_states_that_do_not_fit_the_head_are_refused(width: int, products: Factors) -> None:
    """Catches compiled code that reads on beside the head's weights, or a part of the states."""
    r = Readout(nn.Identity(), nn.Linear(HIDDEN, 50, bias=False))
    with pytest.raises((ValueError, RuntimeError), match=f"{width}"):
        lens_statistics(torch.zeros(3, width), torch.ones(3, width), r, products=products)


def test_bad_input_is_named() -> None:
    """Catches broadcasting of one state against many."""
    with pytest.raises(ValueError, match="hidden states"):
        lens_kl(torch.zeros(1, HIDDEN), torch.zeros(2, HIDDEN), READOUTS["plain"])
    with pytest.raises(ValueError, match="chunk"):
        lens_statistics(*states(2, 0.1), READOUTS["plain"], chunk=0)


@pytest.mark.parametrize(
    "head",
    [
        nn.Linear(8, 33, bias=False),
        nn.Linear(8, 33),
        nn.Linear(8, 33, bias=False, dtype=torch.bfloat16),
        nn.Sequential(nn.Linear(8, 33, bias=False)),
    ],
    ids=["plain", "bias", "bfloat16", "module"],
)
def test_reused_memory_changes_no_logit(head: nn.Module) -> None:
    """Catches a shortcut around the head's module that rounds differently or forgets its bias."""
    readout = Readout(nn.Identity(), head, width=30)
    h = torch.randn(5, 8)
    with torch.no_grad():
        for rows in (h, h[:3]):
            assert torch.equal(readout.logits(rows, into="test"), readout.logits(rows))


def test_no_compiler_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a slow lens that nobody is told of."""
    h, other, r = on_a_grid(5, 1500, 2.0**-6, 1.0)
    expected = lens_kl(h, other, r)
    said = "lens.cpp can't be built: no compiler"
    monkeypatch.setattr(lens, "why_not_native", lambda: said)

    assert_close(lens_kl(h, other, r), expected, rtol=2e-6)
    assert [(f.op, f.wanted, f.used, f.reason) for f in fallbacks()] == [
        ("lens_statistics", "native", "aten", said)
    ]


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (nn.Linear(HIDDEN, 40), "it has a bias"),
        (nn.Sequential(nn.Linear(HIDDEN, 40, bias=False)), "the head is a Sequential"),
    ],
    ids=["bias", "module"],
)
def test_other_heads_are_read_whole(head: nn.Module, reason: str) -> None:
    """Catches a bias that pieces forget, and a head whose own forward is passed by."""
    h, other = states(4, 0.1)
    r = Readout(nn.Identity(), head)
    kl = lens_kl(h, other, r)
    assert_close(kl, compare_exactly(r.logits(h), r.logits(other)).kl, rtol=1e-4, atol=1e-12)
    assert [reason in fallback.reason for fallback in fallbacks()] == [True]


def test_memory_does_not_grow_with_rows_or_ids() -> None:
    """Catches a tensor of tokens × vocabulary: pieces are 2 · 128 × 1,024 floats, 1 MB."""
    workspace.clear()
    h, other, r = on_a_grid(600, 20_000, 2.0**-6, 1.0)
    with prefer("pieces"):
        lens_kl(h, other, r)
    held = sum(b.numel() for b in workspace._buffers.values())
    assert held == 2 * PAIRS * COLUMNS
