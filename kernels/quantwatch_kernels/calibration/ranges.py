"""Static activation ranges of many selections from one pass over the pool.

The min-max observer's range of some samples is the smallest and largest of the samples' own
ranges, exactly. So a pool is run once, ends [N, L, 2] are kept (N samples, L layers, low and high,
float64), and any selection's scales are those that `quantize_` would find on the same samples. Only
for min-max: the other observers don't fall apart into samples.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.calibration.pool import check_pool, device_of
from quantwatch_kernels.quantize.activations import ActivationQuantizer
from quantwatch_kernels.quantize.interpose import transformed_input
from quantwatch_kernels.quantize.observers import tensor_qparams

__all__ = ["joined_ranges", "sample_ranges", "set_ranges"]


def sample_ranges(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], pool: Sequence[Tensor]
) -> Tensor:
    """Return the smallest and largest input of each (name, linear layer), float64 [N, L, 2].

    Raises ValueError for a bad pool, and naming sample and layer where inputs aren't finite or a
    sample doesn't reach a layer.
    """
    check_pool(model, pool)
    ends = torch.full((len(layers), 2), torch.nan, dtype=torch.float64)

    def hook_of(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            low, high = torch.aminmax(transformed_input(module, args[0]))
            ends[index] = torch.stack([low, high]).double().cpu()

        return hook

    hooks = [m.register_forward_pre_hook(hook_of(n)) for n, (_, m) in enumerate(layers)]
    found = []
    try:
        with torch.no_grad():
            for number, ids in enumerate(pool):
                ends.fill_(torch.nan)
                model(ids.to(device_of(model)), use_cache=False)
                bad = (~torch.isfinite(ends)).any(1).nonzero().flatten().tolist()
                if bad:
                    raise ValueError(
                        f"sample {number} of the pool: {layers[bad[0]][0]} gets no finite input."
                    )
                found.append(ends.clone())
    finally:
        for each in hooks:
            each.remove()
    return torch.stack(found)


def joined_ranges(ranges_NL2: Tensor, samples: Iterable[int]) -> Tensor:
    """Return the min-max ranges [L, 2] of some samples together. Raises ValueError for none."""
    chosen = list(samples)
    if not chosen:
        raise ValueError("a range needs at least one sample; there is none.")
    part = ranges_NL2[chosen]
    return torch.stack([part[..., 0].amin(0), part[..., 1].amax(0)], -1)


def set_ranges(quantizers: Sequence[ActivationQuantizer], ranges_L2: Tensor) -> None:
    """Give static quantizers their scales, in the order of the ranges' layers."""
    for quantizer, (low, high) in zip(quantizers, ranges_L2.tolist(), strict=True):
        made = tensor_qparams(low, high, quantizer.spec.format)
        quantizer.scale, quantizer.zero = made.scales, made.zeros
