"""What tests of kernels share: comparison that shows its numbers, builders, poisoned memory.

Part of the package so that a back end registered elsewhere can be tested the same way.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from quantwatch_kernels.numerics import relative_rmse

__all__ = ["VIEWS", "assert_close", "drifted_logits", "poison_empty"]


def assert_close(
    actual: Tensor, expected: Tensor, *, rtol: float, atol: float = 0.0, what: str = "result"
) -> None:
    """Compare elementwise in float64, printing the largest difference and the RMS ratio either way.

    NaN equals NaN and an infinity equals itself; anything else non-finite is a failure.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    a, b = actual.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    a, b = (torch.where(same, 0.0, x) for x in (a, b))
    gap = (a - b).abs()
    ratio = relative_rmse(a, b)
    largest = gap.max().item() if gap.numel() else 0.0
    message = f"{what}: max |Δ| {largest:.3e}, RMS ratio {ratio:.3e} (rtol {rtol:g}, atol {atol:g})"
    print(message)  # noqa: T201 — pytest shows it beside a failure
    bad = ~(gap <= atol + rtol * b.abs())
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        detail = f"first at {index}: {actual[index].item()!r} is not {expected[index].item()!r}"
        raise AssertionError(f"{message}; {detail}, {int(bad.sum())} of {bad.numel()}")


def drifted_logits(rows: int, width: int, drift: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return float32 logits (spread 3, one id far ahead) and a copy with Gaussian drift."""
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(rows, width, generator=generator)
    z[:, 1 % width] += 8
    return z, z + drift * torch.randn(rows, width, generator=generator)


def _strided(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": _strided,
    "expanded": lambda x: x[:1].expand_as(x),
}
"""Four memory layouts of a matrix. "expanded" repeats its first row with stride 0."""


@contextmanager
def poison_empty(package: str) -> Iterator[None]:
    """Fill what `torch.empty` and its kin return with NaN (ints: 85) when code of `package` asks.

    A kernel that forgets to write one element then fails at once.
    """

    def poisoned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor = function(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.split(".")[0] == package:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 85)
            return tensor

        return call

    # torch notes at the first use of a device context which functions it is for: not ours, or
    # nothing would be made on the meta device as long as the process lives.
    with torch.device("cpu"):
        torch.empty(0)
    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", poisoned(Tensor.new_empty)),
    ):
        yield
