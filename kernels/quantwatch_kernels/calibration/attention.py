"""Attention weights of a model, one layer of one sample at a time.

Only the eager implementation forms the weights. Inside `attention_reader` the model uses it, and
afterwards what it used before; outputs differ by rounding meanwhile. A hook on each decoder layer's
children hands the weights [H, T, T] on as they arise and nobody keeps them, so one layer's are in
memory at a time. Found by their shape, not by a module's name: the second output of a child, 4-D,
as many queries as keys.

How uneven a head attends, its variance: that of a query's weights over the keys it may see (its own
position and all before), averaged over the queries:

    mean_t [ Σ_k w² ÷ n_t − (Σ_k w ÷ n_t)² ],   n_t = t + 1,   t counted from 0

in float64; 0 for even attention. Query 0 is left out, since its one weight is always 1. Masked keys
are never counted, but a sliding window's are: their weight is 0. A query that attends to a single
key gives 1/n_t − 1/n_t², so the variance falls with a sample's length whatever its content.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.calibration.pool import device_of
from quantwatch_kernels.quantize.decoder_layers import find_decoder_layers

__all__ = ["Reader", "attention_reader", "attention_variance", "head_variances"]

Reader = Callable[[Tensor, Callable[[Tensor], None]], Tensor]
"""(token ids [1, T], take) → logits [T, V]; take gets weights [H, T, T], layer after layer."""


def attention_variance(weights_HTT: Tensor, queries: slice = slice(1, None)) -> Tensor:
    """Return the variance of each head's weights over the keys, mean over `queries`; float64 [H].

    `queries` are positions from 1 on.
    """
    length = weights_HTT.shape[-1]
    rows = weights_HTT[:, queries].float()
    num_keys = torch.arange(1, length + 1, device=rows.device, dtype=torch.float64)[queries]
    mean = rows.sum(-1, dtype=torch.float64) / num_keys
    square = rows.square().sum(-1, dtype=torch.float64) / num_keys
    # Both are 1/n² for even attention: what rounding leaves below 0 is 0.
    return (square - mean.square()).clamp(min=0).mean(-1)


def head_variances(
    read: Reader, ids: Tensor, queries: slice = slice(1, None)
) -> tuple[Tensor, Tensor]:
    """Return (variance of every head, layer after layer, float64 [heads]; logits [T, V])."""
    found: list[Tensor] = []
    logits = read(ids, lambda weights: found.append(attention_variance(weights, queries).cpu()))
    return torch.cat(found), logits


class _Run:
    """One sample's pass: checks the weights as they arise and hands them on."""

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        self.num_layers = 0
        self._take = take

    def see(self, output: Any) -> None:
        """Take a module's output, if attention weights are in it."""
        weights = _weights_in(output)
        if weights is None:
            return
        self.num_layers += 1
        if not bool(torch.isfinite(weights[0]).all()):
            raise ValueError("its attention weights are not finite.")
        self._take(weights[0])


@contextmanager
def attention_reader(model: nn.Module) -> Iterator[Reader]:
    """Yield a function that runs the model and hands on its attention weights.

    Raises ValueError for a model that forms none, even eagerly, and when one isn't finite.
    """
    runs: list[_Run] = []

    def read(ids: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        runs[:] = [_Run(take)]
        with torch.no_grad():
            logits: Tensor = model(ids.to(device_of(model)), use_cache=False).logits[0]
        if not runs.pop().num_layers:
            raise ValueError(
                f"{type(model).__name__} gives no attention weights, even in its eager "
                "implementation; choose a selection that needs none."
            )
        return logits

    children = [child for _, layer in find_decoder_layers(model) for child in layer.children()]
    hooks = [c.register_forward_hook(lambda _m, _a, out: runs[-1].see(out)) for c in children]
    try:
        with _eager(model):
            yield read
    finally:
        for each in hooks:
            each.remove()


def _weights_in(output: Any) -> Tensor | None:
    if not isinstance(output, tuple) or len(output) < 2 or not isinstance(output[1], Tensor):
        return None
    weights = output[1]
    return weights if weights.ndim == 4 and weights.shape[-2] == weights.shape[-1] else None


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Let every part of the model form its attention weights; restores what was used before."""
    configs = _attention_configs(model)
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = "eager"
        yield
    finally:
        # Outer ones first, as modules are listed: setting one sets those inside it too.
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def _attention_configs(model: nn.Module) -> Sequence[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())
