"""The entropy of what a module gives: one number for how evenly its values use their range.

Shannon entropy in nats of a histogram with 256 equal bins from the smallest to the largest value of
the module's output, over all tokens and channels: −Σ p ln p, between 0 (constant) and ln 256 = 5.55
(flat). 256 bins are what 8 bits per tensor can tell apart. It is the column "activation entropy"
beside a sensitivity; whether it predicts anything is what the table shows.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.experts import watching_experts
from quantwatch_kernels.quantize.groups import Group
from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["BINS", "entropy", "group_entropies"]

BINS = 256


def entropy(values: Tensor) -> float:
    """Return −Σ p ln p of a histogram of `values`, any shape, in nats.

    Raises ValueError when there are none or one isn't finite.
    """
    flat = values.detach().flatten().double()
    if not flat.numel() or not bool(torch.isfinite(flat).all()):
        raise ValueError(f"entropy needs finite values; there are {flat.numel()}, some aren't.")
    low, high = flat.min().item(), flat.max().item()
    if low == high:
        return 0.0
    share = torch.histc(flat, BINS, low, high) / flat.numel()
    return float(-torch.special.xlogy(share, share).sum()) + 0.0


def group_entropies(walk: LayerWalk, groups: Sequence[Group]) -> dict[str, float]:
    """Return the entropy of each group's output by name; groups that give nothing are left out.

    The groups are those of the layer whose turn it is, or embedding or head.
    """
    kept: dict[str, list[Tensor]] = {group.name: [] for group in groups}
    with _listening(walk.model, groups, kept), torch.no_grad():
        if groups[0].layer is None:
            for ids in walk.inputs:
                walk.model(ids, use_cache=False)
        else:
            for number, hidden in enumerate(walk.hidden):
                walk.call(groups[0].layer, number, hidden)
    return {
        name: entropy(torch.cat([output.flatten() for output in outputs]))
        for name, outputs in kept.items()
        if outputs
    }


@contextmanager
def _listening(
    model: nn.Module, groups: Sequence[Group], kept: dict[str, list[Tensor]]
) -> Iterator[None]:
    # An expert's own output is what its last matrix gives.
    last = {
        group.parts[-1].key: group
        for group in groups
        if group.kind == "expert" and group.parts[-1].expert is not None
    }
    stacked = [group.parts[-1] for group in last.values()]
    hooks = [
        model.get_submodule(group.path).register_forward_hook(_keeper(kept[group.name]))
        for group in groups
        if group not in last.values()
    ]
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        if stacked:
            stack.enter_context(
                watching_experts(model, stacked, lambda key, _, y: kept[last[key].name].append(y))
            )
        yield


def _keeper(outputs: list[Tensor]) -> Any:
    def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).detach())

    return keep
