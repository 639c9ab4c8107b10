"""Checks and draws that every selection of calibration samples shares."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.decoder_layers import check_inputs

__all__ = ["check_count", "check_pool", "device_of", "draw"]


def check_pool(model: nn.Module, pool: Sequence[Tensor], shortest: int = 1) -> None:
    """Raise ValueError unless every sample is token ids [1, T] with T ≥ `shortest`.

    One sequence per sample, so that nothing is ever padded; and unless the model is in evaluation
    mode, where the same sample always scores the same.
    """
    check_inputs(model, pool)
    for number, ids in enumerate(pool):
        if ids.shape[0] != 1:
            raise ValueError(
                f"sample {number} of the pool must be one sequence [1, T]; it is {list(ids.shape)}."
            )
        if ids.shape[1] < shortest:
            raise ValueError(
                f"sample {number} of the pool has {ids.shape[1]} token; "
                f"this selection needs at least {shortest}."
            )
    if model.training:
        raise ValueError("a model must be in evaluation mode to choose calibration samples.")


def check_count(count: int, available: int) -> None:
    """Raise ValueError unless 1 ≤ count ≤ available."""
    if not 1 <= count <= available:
        raise ValueError(
            f"{count} calibration samples can't be chosen out of {available}; "
            f"allowed are 1 … {available}."
        )


def draw(numbers: Sequence[int], count: int, seed: int) -> list[int]:
    """Return `count` of the numbers, drawn without replacement; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(numbers), generator=generator)[:count]
    return [numbers[index] for index in order.tolist()]


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter is."""
    return next(model.parameters()).device
