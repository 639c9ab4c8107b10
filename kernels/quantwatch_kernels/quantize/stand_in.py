"""Run a module of another model in the place of one's own, and tell their outputs apart.

The reference's module keeps its place and its name; only its `forward` answers otherwise. So it
doesn't matter who holds it (a list, an attribute, a walk). What does: who never calls it, but reads
its weight, doesn't notice; `num_calls` tells.

    reference   the module as it is: the control, through the same detour
    candidate   the other model's module, fed what the reference's is fed
    compared    as reference; the other is run beside it, and their outputs y and y′ are compared
    noise       y + n, n Gaussian, rescaled per token to ‖y′ − y‖ once y + n is rounded: an error of
                the same size in a random direction

Where the two models compute in different dtypes, what goes in and comes out is cast. Theirs, not
the module's: a block may begin with a router whose weights are wider than what it computes in.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.displaced import displaced
from quantwatch_kernels.quantize.replaced import replaced

__all__ = ["Dtypes", "Mode", "StandIn"]

Dtypes = tuple[torch.dtype, torch.dtype]
Mode = Literal["reference", "candidate", "compared", "noise"]


class StandIn:
    """`other` in the place of `module` while `as_` is entered; `name` and `seed` make the noise.

    `dtypes` are those that the models compute in which `module` and `other` are of.
    """

    def __init__(
        self, module: nn.Module, other: nn.Module, dtypes: Dtypes, name: str, seed: int
    ) -> None:
        """Change nothing yet."""
        self.module = module
        self.other = other
        self.num_calls = 0
        self.is_equal = True
        """Whether all outputs compared so far were equal, bit for bit."""
        self._squares = [0.0, 0.0]
        self._seed = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
        self._dtypes = dtypes

    @property
    def relative_error(self) -> float:
        """‖y′ − y‖ ÷ ‖y‖ over all tokens compared; 0 where nothing differs."""
        error, size = self._squares
        return 0.0 if error == 0 else math.sqrt(error / size) if size else math.inf

    @contextmanager
    def as_(self, mode: Mode) -> Iterator[None]:
        """Inside, the module answers as `mode` says; noise begins anew each time."""
        own = self.module.forward
        generator = torch.Generator().manual_seed(self._seed)
        self.num_calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if mode == "reference":
                return own(*args, **kwargs)
            if mode == "candidate":
                return self._other(args, kwargs)
            return self._beside(own, args, kwargs, generator if mode == "noise" else None)

        with replaced(self.module, forward):
            yield

    def _other(self, args: Any, kwargs: Any) -> Any:
        ours, theirs = self._dtypes
        if ours == theirs:
            return self.other(*args, **kwargs)
        return _cast(self.other(*_cast(args, theirs), **_cast(kwargs, theirs)), ours)

    def _beside(
        self, own: Callable[..., Any], args: Any, kwargs: Any, generator: torch.Generator | None
    ) -> Any:
        # Either may work on what it is given.
        theirs = self._other(_map(args, Tensor.clone), _map(kwargs, Tensor.clone))
        mine = own(*args, **kwargs)
        y = _first(mine)
        error = _first(theirs).double() - y.double()
        if generator is None:
            self.is_equal &= _equal(mine, theirs)
            self._squares[0] += float(error.square().sum())
            self._squares[1] += float(y.double().square().sum())
            return mine
        direction = torch.randn(y.shape, generator=generator).to(y.device)
        noisy = displaced(y, direction, error.norm(dim=-1))
        return (noisy, *mine[1:]) if isinstance(mine, tuple) else noisy


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else True


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return _map(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested arguments with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_map(item, change) for item in value)
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    return value
