"""Heads for the lens to read through."""

from torch import Tensor, nn

from quantwatch_kernels.compare.lens import Readout


def readout(weight: Tensor, **settings: float | int) -> Readout:
    """No norm, and a head of this weight [V, H]."""
    ids, width = weight.shape
    head = nn.Linear(width, ids, bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return Readout(nn.Identity(), head, **settings)  # type: ignore[arg-type]


def weight_of(r: Readout) -> Tensor:
    """The head's weight [V, H]."""
    assert isinstance(r.head, nn.Linear)
    return r.head.weight
