"""Several models read off beside one reference: the same numbers, its products made once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.compare import lens_native
from quantwatch_kernels.compare.lens import Readout, lens_statistics, lens_statistics_of_many
from quantwatch_kernels.compare.lens_native import COLUMNS
from quantwatch_kernels.registry import prefer
from quantwatch_kernels.testing import assert_close

HIDDEN, VOCABULARY, ROWS = 32, COLUMNS + 300, 300


def readout(**settings: Any) -> Readout:
    torch.manual_seed(3)
    return Readout(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False), **settings)


READOUTS = {
    "plain": readout(),
    "soft-capped": readout(scale=2.0, softcap=3.0),
    "cut": readout(width=650),
}


def states() -> tuple[Tensor, list[Tensor]]:
    """A reference and: one that drifts, one equal but for some rows, an equal one, a broken one."""
    torch.manual_seed(1)
    h = torch.randn(ROWS, HIDDEN)
    some, broken = h.clone(), h + 0.1 * torch.randn(ROWS, HIDDEN)
    some[::7] += 0.5
    broken[5, 3], broken[6, 2] = torch.inf, torch.nan
    return h, [h + 0.05 * torch.randn(ROWS, HIDDEN), some, h.clone(), broken]


@pytest.mark.parametrize("backend", ["native", "aten"])
@pytest.mark.parametrize("name", READOUTS)
def test_each_is_as_alone(name: str, backend: str) -> None:
    """Catches another model's rows, a lost zero of an equal row, a NaN that spreads.

    Products of other shapes may round otherwise: by 1e-7 of the logits, 1e-5 of these drifts.
    """
    r, (h, others) = READOUTS[name], states()
    with prefer(backend):
        found = lens_statistics_of_many(h, others, r)
        alone = [lens_statistics(h, other, r) for other in others]
    for number, (ours, theirs) in enumerate(zip(found, alone, strict=True)):
        for column, other in zip(ours, theirs, strict=True):
            assert torch.equal(column.isnan(), other.isnan())
            fine = ~other.isnan()
            assert_close(column[fine], other[fine], rtol=2e-5, atol=1e-12, what=f"{number}")
    untouched = torch.arange(ROWS) % 7 != 0
    assert (found[1].kl[untouched] == 0).all()
    assert (found[1].kl[~untouched] > 0).all()
    assert all((column == 0).all() for column in found[2])
    assert found[3].kl[[5, 6]].isnan().all()
    assert found[3].kl[7:].isfinite().all()


@pytest.mark.skipif(lens_native.why_not_native() is not None, reason="no compiler")
def test_the_reference_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the cost of a reference per model, which this is there to save."""
    rows = 0
    real = lens_native._products

    def counted(x: Tensor, *others: Any) -> Tensor:
        nonlocal rows
        rows += len(x)
        return real(x, *others)

    monkeypatch.setattr(lens_native, "_products", counted)
    torch.manual_seed(0)
    h = torch.randn(100, HIDDEN)
    others = [h + 0.1 * torch.randn_like(h) for _ in range(4)]
    pieces = -(-VOCABULARY // COLUMNS)
    lens_statistics_of_many(h, others, READOUTS["plain"])
    assert rows == pieces * 100 * (1 + 4)
    rows = 0
    for other in others:
        lens_statistics(h, other, READOUTS["plain"])
    assert rows == pieces * 100 * 8


def test_shapes_that_dont_fit_are_refused() -> None:
    """Catches a second model that is compared row by row with another text."""
    h = torch.randn(4, HIDDEN)
    with pytest.raises(ValueError, match="hidden states"):
        lens_statistics_of_many(h, [h + 1, h[:3]], READOUTS["plain"])
