"""Hidden states read off through one readout."""

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.lens import Readout, lens_kl, lens_statistics
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.testing import assert_close

HIDDEN, VOCABULARY = 32, 700


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


def states(rows: int, drift: float) -> tuple[Tensor, Tensor]:
    h = torch.randn(rows, HIDDEN)
    return h, h + drift * torch.randn(rows, HIDDEN)


@pytest.mark.parametrize("drift", [1e-4, 0.05, 3.0])
@pytest.mark.parametrize("name", READOUTS)
def test_equals_the_definition(name: str, drift: float) -> None:
    """Catches soft-capping or a scale that is left out of one of the two paths."""
    r, (h, other) = READOUTS[name], states(100, drift)
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
    # The twin multiplies all rows at once; so must we, for the same rounding of the logits.
    for a, b in zip(lens_statistics(h, other, r, chunk=100), twin, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-6 * b.mean().item() + 1e-15)


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
