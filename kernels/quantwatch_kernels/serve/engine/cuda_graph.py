"""`Graph` by CUDA: captured on a stream of its own, all graphs in one pool of memory.

Graphs replay one after the other and results are copied out at once, so they may share memory.
"""

from typing import Any

import torch

__all__ = ["CudaGraph", "CudaGraphs"]


class CudaGraphs:
    """Makes graphs that share a pool and a stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self) -> "CudaGraph":
        """Return a graph that nothing is recorded in."""
        return CudaGraph(self._pool, self._stream)


class CudaGraph:
    """One graph; see `pieces.Graph`."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool, self._stream = pool, stream
        self._outside: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Start to record what the current thread launches."""
        torch.cuda.synchronize()
        self._outside = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        self._graph.capture_begin(pool=self._pool)

    def end(self) -> None:
        """Stop, and go back to the stream from before."""
        assert self._outside is not None
        self._graph.capture_end()
        torch.cuda.set_stream(self._outside)

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()
