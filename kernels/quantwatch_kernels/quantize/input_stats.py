"""What calibration knows about the inputs of a linear layer, and hooks that collect it.

H = 2/n Σ x xᵀ and mean |x| over the n tokens that reached the layer, in float64; the products of
one batch, or of several short ones, are float32. x is what the matrix is multiplied with: after a
transform of the input (an online rotation) that the layer may have.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.gptq import Feedback, factorize
from quantwatch_kernels.quantize.interpose import transformed_input

__all__ = ["InputStats", "collect"]

_ROWS = 512


class InputStats:
    """Sums over the inputs [.., K] of one layer, or of several that share their input."""

    def __init__(self, columns: int) -> None:
        self.tokens = 0
        self._sums = torch.zeros(columns, columns, dtype=torch.float64)
        self._waiting: list[Tensor] = []
        self._magnitudes = torch.zeros(columns, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Take in activations [.., K] of any float dtype; an empty batch changes nothing."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self.tokens += len(rows)
        self._magnitudes += rows.abs().sum(0, dtype=torch.float64)
        self._waiting.append(rows if rows.data_ptr() != x.data_ptr() else rows.clone())
        if sum(len(waiting) for waiting in self._waiting) >= _ROWS:
            self._products()
        self.__dict__.pop("feedback", None)

    def _products(self) -> Tensor:
        """Return Σ x xᵀ; adding float64 [K, K] costs as much as the products of a short prompt."""
        if self._waiting:
            rows = torch.cat(self._waiting)
            self._waiting.clear()
            self._sums += rows.T @ rows
        return self._sums

    @property
    def hessian(self) -> Tensor:
        """2/n Σ x xᵀ, float64 [K, K]; zeros if no token came."""
        return 2 * self._products() / max(self.tokens, 1)

    @property
    def mean_magnitude(self) -> Tensor:
        """Mean |x| of each input, float64 [K]."""
        return self._magnitudes / max(self.tokens, 1)

    @property
    def finite(self) -> bool:
        """Whether every activation was finite (`factorize` checks the products too)."""
        return bool(torch.isfinite(self._magnitudes).all())

    @cached_property
    def feedback(self) -> Feedback:
        """GPTQ's factor of the Hessian, made once for all layers with this input."""
        return factorize(self.hessian)


class _Seen(Exception):  # noqa: N818 — no error: every layer that was asked for has been reached
    pass


def collect(
    modules: Sequence[tuple[str, nn.Module, int]], forwards: Iterable[Callable[[], object]]
) -> dict[str, InputStats]:
    """Return the statistics by name of (name, module, number of inputs) over forward passes.

    A pass is given up as soon as each module has been called once. Raises ValueError, naming the
    module, when an input isn't finite.
    """
    stats = {name: InputStats(columns) for name, _, columns in modules}
    seen: set[str] = set()

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            stats[name].add(transformed_input(module, args[0]))
            if not stats[name].finite:
                raise ValueError(f"{name}: the activations that reach it aren't finite.")
            seen.add(name)
            if len(seen) == len(stats):
                raise _Seen

        return hook

    hooks = [module.register_forward_pre_hook(hook_of(name)) for name, module, _ in modules]
    try:
        for forward in forwards:
            seen.clear()
            with torch.no_grad(), suppress(_Seen):
                forward()
    finally:
        for hook in hooks:
            hook.remove()
    return stats
