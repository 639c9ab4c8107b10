"""Find the hidden states in a module's arguments and output, whatever its signature."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantwatch.capture.batches import Batch
from quantwatch.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments a module was called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def hidden(self, batch: Batch) -> dict[int | str, Tensor]:
        """Return the arguments that carry hidden states, by position or name.

        The first floating tensor with one row per token, and all others of the same shape (a
        residual that is added inside). Position embeddings have other shapes, and a mask
        [B, 1, T, T] counts only when there is nothing else.
        """
        tensors = {
            key: value
            for key, value in self._arguments()
            if isinstance(value, Tensor) and value.is_floating_point() and batch.fits(value)
        }
        flat = [tensor.shape for tensor in tensors.values() if tensor.ndim < 4]
        shape = next(iter([*flat, *(tensor.shape for tensor in tensors.values())]), None)
        return {key: tensor for key, tensor in tensors.items() if tensor.shape == shape}

    def replace(self, values: Mapping[int | str, Tensor]) -> "Call":
        """Return the call with some arguments replaced."""
        args = tuple(values.get(n, value) for n, value in enumerate(self.args))
        kwargs = {name: values.get(name, value) for name, value in self.kwargs.items()}
        return Call(args, kwargs)

    def without(self, given: object) -> "Call":
        """Return the call with None in the place of one object."""
        args = tuple(None if value is given else value for value in self.args)
        kwargs = {n: None if value is given else value for n, value in self.kwargs.items()}
        return Call(args, kwargs)

    def _arguments(self) -> Iterator[tuple[int | str, Any]]:
        yield from enumerate(self.args)
        yield from self.kwargs.items()


def hidden_output(output: Any, batch: Batch, what: str) -> Tensor:
    """Return the hidden states of a module's output: itself, or the first tensor of a tuple.

    Raises:
        CaptureError: there is none with one row per token; `what` names model and scope.
    """
    first = output
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    if isinstance(first, Tensor) and first.is_floating_point() and batch.fits(first):
        return first
    rows = f"[{len(batch.sequences)}, {batch.width}, …]"
    shape = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
    raise CaptureError(f"{what} returned {shape}; hidden states {rows} were expected")
