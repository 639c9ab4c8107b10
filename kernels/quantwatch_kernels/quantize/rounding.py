"""The two rules of rounding: half to even everywhere, stochastic where a recipe asks for it."""

from typing import Literal

import torch
from torch import Generator, Tensor

__all__ = ["Rounding", "round_to_code"]

Rounding = Literal["nearest", "stochastic"]


def round_to_code(steps: Tensor, generator: Generator | None = None) -> Tensor:
    """Round to integers: to nearest, halves to even; with a generator stochastically.

    Stochastic rounding takes ⌈x⌉ with probability x − ⌊x⌋, so its expectation is x and the error of
    a sum doesn't grow with the number of terms' bias; a single value errs by up to a whole step.
    Clamping the code afterwards would undo that: `stochastic` chooses scales that leave room.
    """
    if generator is None:
        return steps.round()
    noise = torch.rand(steps.shape, generator=generator, device=steps.device, dtype=torch.float64)
    return (steps.double() + noise).floor().to(steps.dtype)
