"""Speed of whole models as a multiple of a baseline's, interleaved in one run.

decode: one token for one row, behind a cache of the prompt. prefill: the prompt's tokens at once,
without a cache, logits of the last position only. As in `bench`, a round runs every model once in
an order that rotates and gives one ratio, baseline's seconds ÷ candidate's; the figure is the
median over rounds, its interval a percentile bootstrap. Only ratios of one run mean something: on a
shared machine absolute times move by a factor of two. The caller pins the threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantwatch.kernel_lab.bench import interleaved, median_interval
from quantwatch_kernels.calibration.generation import cache_name


@dataclass(frozen=True, slots=True)
class Ratio:
    """Above 1: faster than the baseline; `low` and `high` bound the median with 95 %."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """One model against the baseline."""

    decode: Ratio
    prefill: Ratio


def throughput(
    baseline: nn.Module, candidates: Sequence[nn.Module], prompt: Tensor, *, rounds: int
) -> list[Throughput]:
    """Time every candidate against the baseline on token ids [1, T].

    Raises ValueError for more than one row, fewer than 5 rounds, and a model without a cache.
    """
    if prompt.ndim != 2 or prompt.shape[0] != 1 or not prompt.shape[1]:
        raise ValueError(f"the prompt must be one row [1, T]; it is {list(prompt.shape)}.")
    if rounds < 5:
        raise ValueError(f"rounds must be at least 5; they are {rounds}.")
    models = [baseline, *candidates]
    with torch.inference_mode():
        decode = _ratios([_decoder(model, prompt) for model in models], rounds)
        prefill = _ratios([_prefiller(model, prompt) for model in models], rounds)
    return [Throughput(one, all_) for one, all_ in zip(decode, prefill, strict=True)]


def run_cached(model: nn.Module, ids: Tensor) -> tuple[Any, dict[str, Any]]:
    """Run ids [B, T] and return the output and the cache, by the name that the model gives it.

    Raises ValueError for a model that takes or returns none.
    """
    name = cache_name(model)
    output = model(ids, use_cache=True) if name else None
    cache = getattr(output, name, None) if name else None
    if name is None or cache is None:
        raise ValueError(f"{type(model).__name__} has no cache that can be handed on.")
    return output, {name: cache}


def _decoder(model: nn.Module, prompt: Tensor) -> Callable[[int], object]:
    _, cached = run_cached(model, prompt)
    token = prompt[:, -1:]

    def run(_copy: int) -> None:
        model(token, use_cache=True, **cached)
        for cache in cached.values():
            cache.crop(-1)

    return run


def _prefiller(model: nn.Module, prompt: Tensor) -> Callable[[int], object]:
    return lambda _copy: model(prompt, use_cache=False, logits_to_keep=1)


def _ratios(runs: list[Callable[[int], object]], rounds: int) -> list[Ratio]:
    seconds = [np.array(taken) for taken in interleaved(runs, 1, rounds)]
    found = [seconds[0] / mine for mine in seconds[1:]]
    return [Ratio(float(np.median(ratios)), *median_interval(ratios)) for ratios in found]
