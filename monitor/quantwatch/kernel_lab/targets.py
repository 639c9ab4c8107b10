"""What a number of bits per weight leaves for the layers, and whether it can be reached at all."""

import math
from collections.abc import Sequence

from torch import nn

from quantwatch.errors import UserError
from quantwatch_kernels.quantize.api import model_size
from quantwatch_kernels.quantize.groups import Group


def budget(module: nn.Module, groups: Sequence[Group], target_bpw: float) -> int:
    """Return the bytes that a target leaves for `groups` beside everything that isn't quantized."""
    size, num_weights = model_size(module)
    parts = [part.weight for group in groups for part in group.parts]
    kept = size - sum(weight.numel() * weight.element_size() for weight in parts)
    return math.floor(target_bpw * num_weights / 8) - kept


def check_target(module: nn.Module, fewest: int, room: int, target: float) -> None:
    """Raise UserError when not even the smallest formats, of `fewest` bytes, fit into `room`."""
    short = fewest - room
    if short > 0:
        _, num_weights = model_size(module)
        smallest = target + 8 * short / num_weights
        raise UserError(
            f"--target-bpw {target:g} can't be reached with these formats: "
            f"the smallest possible is {math.ceil(1000 * smallest) / 1000:g}"
        )
