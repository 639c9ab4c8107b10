"""A graph for a CPU that keeps CUDA's promise and its limits.

`begin` … `end` records every operator with the very tensors it worked on; `replay` calls them again
and writes results into the tensors that were made while recording. So whatever was captured reads
and writes fixed memory, Python runs no more, and a tensor that was put elsewhere since is read at
its old place. Reading a number back to the host can't be captured and raises.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORBIDDEN = (
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default,
    torch.ops.aten.nonzero.default,
)  # fmt: skip


class FakeGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]  # an untyped base
    """What a test puts in CUDA's place."""

    made: ClassVar[list["FakeGraph"]] = []

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.replays = 0
        self.made.append(self)

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FORBIDDEN:
            raise RuntimeError(f"{func} can't be captured")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            given = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            if made and all(storage(x) in given for x in made) and func.is_view:
                continue
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, new in zip(made, again, strict=True):
                if storage(old) not in given:
                    old.copy_(new)


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
