"""Let a module answer otherwise for a while, whoever holds it."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["replaced"]


@contextmanager
def replaced(
    module: nn.Module, forward: Callable[..., Any], *, with_hooks: bool = True
) -> Iterator[None]:
    """Inside, calling `module` calls `forward`, with its forward hooks around it or without."""
    before = module.__dict__.get("forward")
    hooks = module._forward_pre_hooks, module._forward_hooks
    try:
        module.forward = forward
        if not with_hooks:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        module._forward_pre_hooks, module._forward_hooks = hooks
        del module.__dict__["forward"]
        if before is not None:
            module.forward = before
