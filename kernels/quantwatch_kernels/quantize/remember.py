"""Outputs of linear layers that are final, kept so that no later pass computes them again.

Calibration passes over a decoder layer once for each group of linear layers that read the same
input (q, k, v; o; gate, up; down) and once more to move on. After its group a linear layer's
weights don't change, and its inputs don't either, since all that is called before it is final, too.
So each input's output is computed once and handed out again: the same bits, with half of the
multiplications.

Given up: linear layers that are called twice in a pass (what comes between may change the second
input), and outputs beyond a limit of memory; both are computed again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["Memory", "remembering"]

LIMIT_BYTES = 2**30
"""Of one decoder layer's outputs: 58,000 tokens of SmolLM2-135M in float32, 13,700 of Llama-3-8B in
16 bits."""


class Memory:
    """What is kept while `walk` is at one decoder layer; copies, since models write in place."""

    def __init__(self, walk: LayerWalk, limit_bytes: int) -> None:
        """Keep nothing yet."""
        self._walk = walk
        self._left = limit_bytes
        self._forwards: dict[nn.Module, Callable[..., Any] | None] = {}

    def keep(self, module: nn.Module) -> None:
        """From now on compute `module`, called by the walk, once per input."""
        if module in self._forwards:
            return
        kept: dict[int, Tensor] = {}
        last_pass = -1
        forward = module.forward
        before = module.__dict__.get("forward")

        def once(*args: Any, **kwargs: Any) -> Any:
            nonlocal last_pass
            number, this_pass = self._walk.current, self._walk.num_calls
            if number is None or torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if this_pass == last_pass:
                self._restore(module)
                return forward(*args, **kwargs)
            last_pass = this_pass
            if number in kept:
                return kept[number].clone()
            output = forward(*args, **kwargs)
            if isinstance(output, Tensor) and output.nbytes <= self._left:
                self._left -= output.nbytes
                kept[number] = output.clone()
            return output

        self._forwards[module] = before
        module.forward = once

    def forget(self) -> None:
        """Compute everything again from now on."""
        for module in list(self._forwards):
            self._restore(module)

    def _restore(self, module: nn.Module) -> None:
        before = self._forwards.pop(module)
        del module.__dict__["forward"]
        if before is not None:
            module.forward = before


@contextmanager
def remembering(walk: LayerWalk) -> Iterator[Memory]:
    """Give a memory that ends with the block: the modules are then as they were."""
    memory = Memory(walk, LIMIT_BYTES)
    try:
        yield memory
    finally:
        memory.forget()
