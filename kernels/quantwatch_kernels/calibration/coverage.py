"""Coverage: samples that together stand for the pool, chosen one after the other.

Both choose greedily the sample that adds most to f(S) = Σ_c max_{j ∈ S} gain[j, c], which is within
1 − 1/e of the best set, since f grows with diminishing returns (Nemhauser, Wolsey and Fisher 1978):

- coverage (facility location): c runs over the pool's samples, gain = (1 + cosine) ÷ 2 of x_j and
  x_c. x is the mean hidden state behind every decoder layer, side by side, each channel less its
  median over the pool and in units of its median distance from that: means and standard deviations
  would follow a single odd sample. The cosine leaves a sample's size out, else the oddest one would
  be chosen for standing so far away. Channels that are the same in most samples count nothing.
- extremes: c runs over the channels behind every layer, gain = max |h| in the sample ÷ max |h| in
  the pool. What a range that must hold everything needs, and what an odd sample is good at.

Stratified: with labels (a length, a category) each gets its share of the samples, by largest
remainders, and a sample is only chosen while its label has some left. Of equal gains the first
sample wins; nothing is random. Given up: a second look at samples that were chosen early.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.calibration.pool import check_count, check_pool, device_of
from quantwatch_kernels.quantize.decoder_layers import find_decoder_layers

__all__ = [
    "absmax_features",
    "cover",
    "extreme_gains",
    "facility_gains",
    "length_labels",
    "mean_features",
    "quotas",
]


def mean_features(model: nn.Module, pool: Sequence[Tensor]) -> Tensor:
    """Return the mean hidden state behind every decoder layer, float32 [N, layers · width]."""
    return _features(model, pool, lambda h: h.mean(0))


def absmax_features(model: nn.Module, pool: Sequence[Tensor]) -> Tensor:
    """Return max |h| of every channel behind every decoder layer, float32 [N, layers · width]."""
    return _features(model, pool, lambda h: h.abs().amax(0))


def facility_gains(features_NF: Tensor) -> Tensor:
    """Return how alike each two samples are, float64 [N, N] in 0 … 1."""
    features = features_NF.double()
    away = features - features.median(0).values
    unit = away.abs().median(0).values
    away = away[:, unit > 0] / unit[unit > 0]
    size = torch.linalg.vector_norm(away, dim=1, keepdim=True)
    directions = away / size.where(size > 0, 1)
    gains: Tensor = ((1 + directions @ directions.T) / 2).clamp(0, 1)
    return gains


def extreme_gains(absmax_NF: Tensor) -> Tensor:
    """Return each sample's share of the pool's largest magnitudes, float64 [N, F] in 0 … 1."""
    largest = absmax_NF.double().amax(0)
    return absmax_NF.double() / largest.where(largest > 0, 1)


def quotas(labels: Sequence[Hashable], count: int) -> dict[Hashable, int]:
    """Return how many samples each label gets: its share of `count`, by largest remainders.

    Of equal remainders the label seen first gets one more.
    """
    check_count(count, len(labels))
    sizes = Counter(labels)
    exact = {label: divmod(count * size, len(labels)) for label, size in sizes.items()}
    left = count - sum(whole for whole, _ in exact.values())
    first = sorted(exact, key=lambda label: -exact[label][1])[:left]
    return {label: whole + (label in first) for label, (whole, _) in exact.items()}


def length_labels(pool: Sequence[Tensor], parts: int = 3) -> list[int]:
    """Return which part of the pool, by length, each sample [1, T] is in: 0 the shortest."""
    order = sorted(range(len(pool)), key=lambda number: pool[number].shape[1])
    labels = [0] * len(pool)
    for place, number in enumerate(order):
        labels[number] = place * parts // len(pool)
    return labels


def cover(gains_NC: Tensor, count: int, labels: Sequence[Hashable] | None = None) -> list[int]:
    """Return `count` samples in the order of choice; labels [N] stratify.

    Raises ValueError for a count that isn't possible or gains that aren't finite.
    """
    total = len(gains_NC)
    check_count(count, total)
    if not bool(torch.isfinite(gains_NC).all()):
        raise ValueError("coverage needs finite hidden states; some are not.")
    names = list(labels) if labels is not None else [None] * total
    if len(names) != total:
        raise ValueError(f"{len(names)} labels for {total} samples.")
    left = quotas(names, count)
    best = torch.zeros_like(gains_NC[0])
    chosen: list[int] = []
    for _ in range(count):
        added = (gains_NC - best).clamp(min=0).sum(1)
        shut = [n for n in range(total) if n in chosen or not left[names[n]]]
        added[shut] = -1
        pick = int(added.argmax())
        chosen.append(pick)
        left[names[pick]] -= 1
        best = torch.maximum(best, gains_NC[pick])
    return chosen


def _features(
    model: nn.Module, pool: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    check_pool(model, pool)
    found: list[Tensor] = []

    def hook(_: nn.Module, __: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append(reduce(hidden[0].float()).cpu())

    hooks = [layer.register_forward_hook(hook) for _, layer in find_decoder_layers(model)]
    rows = []
    try:
        with torch.no_grad():
            for number, ids in enumerate(pool):
                found.clear()
                model(ids.to(device_of(model)), use_cache=False)
                rows.append(torch.cat(found))
                if not bool(torch.isfinite(rows[-1]).all()):
                    raise ValueError(
                        f"sample {number} of the pool: its hidden states are not finite."
                    )
    finally:
        for each in hooks:
            each.remove()
    return torch.stack(rows)
