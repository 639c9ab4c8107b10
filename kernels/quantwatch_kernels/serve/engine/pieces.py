"""A forward pass captured in pieces that end where attention begins.

    piece 0 · attention of layer 0 · piece 1 · attention of layer 1 · … · piece n

While it is captured the pass runs through Python once: at each attention the open graph is ended,
the layer's queries, keys and values (which stay where they are) are noted with a buffer for what
attention will answer, and the next graph begins. A replay goes through the pieces and calls
attention in between, on the real tokens; what it answers is copied into the buffer that the next
piece reads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from quantwatch_kernels.serve.engine.interface import Attends, AttentionCall

__all__ = ["Graph", "Pieces", "recording"]


class Graph(Protocol):
    """What is recorded between `begin` and `end`; `replay` does it again on the same addresses."""

    def begin(self) -> None:
        """Start to record."""

    def end(self) -> None:
        """Stop."""

    def replay(self) -> None:
        """Do it again."""


@contextmanager
def recording(graph: Graph) -> Iterator[None]:
    """Inside, record. An error ends the recording; what CUDA then says of it matters no more."""
    graph.begin()
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            graph.end()
        raise
    graph.end()


@dataclass(frozen=True, slots=True)
class _Gap:
    """Where attention stands between two pieces."""

    call: AttentionCall
    answer: Tensor


class Pieces:
    """Answers attention while a pass is captured, and replays it."""

    def __init__(self, make: Callable[[], Graph]) -> None:
        self._make = make
        self._graphs: list[Graph] = []
        self._gaps: list[_Gap] = []
        self._recording = False

    def attention(self, call: AttentionCall) -> Tensor:
        """End the piece before, begin the one after; return the buffer for the answer."""
        if self._recording:
            self._graphs[-1].end()
        shape = (len(call.queries), call.queries.shape[1], call.values.shape[2])
        answer = call.queries.new_zeros(shape)
        if self._recording:
            self._gaps.append(_Gap(call, answer))
            self._next()
        return answer

    def capture(self, once: Callable[[], Tensor]) -> Tensor:
        """Record a pass; return its result, which stays where it is."""
        self._recording = True
        self._next()
        try:
            result = once()
        except BaseException:
            with suppress(RuntimeError):
                self._graphs[-1].end()
            raise
        finally:
            self._recording = False
        self._graphs[-1].end()
        return result

    def replay(self, attends: Attends, count: int) -> None:
        """Do the pass again, with attention over the first `count` tokens."""
        for graph, gap in zip(self._graphs[:-1], self._gaps, strict=True):
            graph.replay()
            call = gap.call
            mine = replace(
                call,
                queries=call.queries[:count],
                keys=call.keys[:count],
                values=call.values[:count],
            )
            gap.answer[:count].copy_(attends.attention(mine))
        self._graphs[-1].replay()

    def _next(self) -> None:
        self._graphs.append(self._make())
        self._graphs[-1].begin()
