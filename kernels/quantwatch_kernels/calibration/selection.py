"""Choose the samples of a pool that a recipe is calibrated on.

Every selection is two steps: measure the pool once with the model, which gives numbers [N, F], and
choose from the numbers. So a part of a pool can be chosen from again without another pass. All are
deterministic; the seed is used by those that draw (random, hierarchical).

| selection | F | chooses |
|---|---|---|
| random | 0 | a draw without replacement; no model is run |
| entropy-attention | 2 | the highest 0.6 · entropy + 0.4 · attention variance (`scores`) |
| hierarchical | heads | a draw of those whose early steps use strong heads (`hierarchical`) |
| coverage | layers · width | those that stand for the pool (`coverage`), stratified |
| extremes | layers · width | those that reach the largest activations (`coverage`), stratified |
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from quantwatch_kernels.calibration.coverage import (
    absmax_features,
    cover,
    extreme_gains,
    facility_gains,
    mean_features,
)
from quantwatch_kernels.calibration.hierarchical import draw_kept, head_activity
from quantwatch_kernels.calibration.pool import check_count, check_pool, draw
from quantwatch_kernels.calibration.scores import combined_score, highest, sample_scores

__all__ = ["SELECTIONS", "Chosen", "SelectionName", "choose", "measure_pool", "select_samples"]

SelectionName = Literal["random", "entropy-attention", "hierarchical", "coverage", "extremes"]
SELECTIONS: tuple[SelectionName, ...] = get_args(SelectionName)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Numbers of samples in the pool, in the order of choice, and what is to be reported."""

    indices: tuple[int, ...]
    notes: tuple[str, ...] = ()


def select_samples(
    model: nn.Module,
    pool: Sequence[Tensor],
    count: int,
    name: SelectionName,
    *,
    seed: int = 0,
    labels: Sequence[Hashable] | None = None,
) -> Chosen:
    """Choose `count` samples, token ids [1, T] each; labels [N] stratify where the name allows it.

    Raises ValueError for an empty pool, a count beyond it, samples that are too short, an unknown
    name, and a model that can't give what the selection needs. The model is left as it was.
    """
    check_pool(model, pool)
    check_count(count, len(pool))
    return choose(name, measure_pool(model, pool, name), count, seed=seed, labels=labels)


def measure_pool(model: nn.Module, pool: Sequence[Tensor], name: SelectionName) -> Tensor:
    """Return the numbers [N, F] that a selection needs of each sample."""
    measures: dict[str, Callable[[nn.Module, Sequence[Tensor]], Tensor]] = {
        "random": lambda _, samples: torch.zeros(len(samples), 0),
        "entropy-attention": sample_scores,
        "hierarchical": head_activity,
        "coverage": mean_features,
        "extremes": absmax_features,
    }
    return measures[_known(name)](model, pool)


def choose(
    name: SelectionName,
    measured_NF: Tensor,
    count: int,
    *,
    seed: int = 0,
    labels: Sequence[Hashable] | None = None,
) -> Chosen:
    """Choose from what `measure_pool` gave, or from some of its rows."""
    total = len(measured_NF)
    check_count(count, total)
    if _known(name) == "random":
        return Chosen(tuple(draw(range(total), count, seed)))
    if name == "entropy-attention":
        return Chosen(tuple(highest(combined_score(measured_NF), count)))
    if name == "hierarchical":
        indices, notes = draw_kept(measured_NF, count, seed)
        return Chosen(tuple(indices), notes)
    gains = facility_gains if name == "coverage" else extreme_gains
    return Chosen(tuple(cover(gains(measured_NF), count, labels)))


def _known(name: str) -> str:
    if name not in SELECTIONS:
        raise ValueError(f"unknown selection {name!r}; allowed are {', '.join(SELECTIONS)}.")
    return name
