"""CUDA graphs by bucket: whole for decode, in pieces for prefill.

A captured graph replays the same kernels on the same addresses. So:

- inputs are copied into buffers that stay where they are, padded to the bucket. A padding row has
  token 0 at position 0, writes into the last slot of the null block and reads slot 0 of it, which
  nothing ever writes: no padding row can change a real one, nor any page of a request;
- a graph is only as good as what it was captured with. Addresses of the pages and the weights and
  the name of the adapter make its stamp; when that changes, every graph is dropped and captured
  again when it is next needed (llama.cpp#7492, xllm#1939: graphs that kept old pointers);
- decode: one graph of the whole forward pass per (rows, keys) bucket, attention over padded lists
  of slots included;
- prefill: what reads keys has a new shape in every step, what lies between doesn't. The pass is
  captured in pieces that end where attention begins (`pieces.py`): attention runs by itself between
  two replays, on the real tokens only.

What no bucket holds runs eagerly and is counted. `Graph` is what CUDA gives; the contract is tested
with a recorder in its place.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from quantwatch_kernels.serve.block_table import BlockTable
from quantwatch_kernels.serve.engine.batch import Batch
from quantwatch_kernels.serve.engine.buckets import Buckets, GraphKey, GraphStats
from quantwatch_kernels.serve.engine.interface import running
from quantwatch_kernels.serve.engine.padded import PaddedDecode
from quantwatch_kernels.serve.engine.pages import copy_pages
from quantwatch_kernels.serve.engine.pieces import Graph, Pieces, recording
from quantwatch_kernels.serve.engine.runner import (
    LayoutAttention,
    ModelRunner,
    StepInputs,
    forward,
    step_inputs,
)

__all__ = ["GraphRunner"]


class _Captured(Protocol):
    def replay(self, inputs: StepInputs) -> Tensor:
        """Return the logits of the real rows."""


class GraphRunner:
    """Runs batches of a runner through graphs where a bucket holds them."""

    def __init__(
        self,
        runner: ModelRunner,
        make: Callable[[], Graph],
        decode: Buckets,
        keys: Buckets,
        prefill: Buckets | None = None,
    ) -> None:
        """`decode`: rows; `keys`: keys that a query reads; `prefill`: tokens, None: eagerly."""
        self.stats, self.adapter = GraphStats(), ""
        self._runner, self._make = runner, make
        self._decode, self._keys, self._prefill = decode, keys, prefill
        self._graphs: dict[GraphKey, _Captured] = {}
        self._stamp = self._addresses()

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        """What is captured now."""
        return tuple(self._graphs)

    @torch.inference_mode()
    def run(self, batch: Batch, tables: Mapping[str, BlockTable]) -> Tensor:
        """Compute a batch; return the logits [n, V] of the rows that sample, in order."""
        runner = self._runner
        copy_pages(runner.pages, batch.copies)
        inputs = step_inputs(batch.rows, tables, runner.dtype, runner.device)
        key = self._key(inputs)
        if key is None:
            self.stats.eager += 1
            return runner.compute(inputs)
        self._drop_if_stale()
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(key)
            self.stats.captured += 1
        self.stats.replayed += 1
        self.stats.padded_rows += key.rows - len(inputs.token_ids)
        return graph.replay(inputs)

    def _key(self, inputs: StepInputs) -> GraphKey | None:
        count, samples = len(inputs.token_ids), len(inputs.sampled_rows)
        if inputs.decodes:
            rows = self._decode.holding(count)
            keys = self._keys.holding(max(row.start + 1 for row in inputs.layout.rows))
            return None if rows is None or keys is None else GraphKey("decode", rows, keys)
        size = None if self._prefill is None else self._prefill.holding(count)
        if size is None or samples > self._decode.sizes[-1]:
            return None
        return GraphKey("prefill", size, 0)

    def _capture(self, key: GraphKey) -> _Captured:
        try:
            if key.kind == "decode":
                return _Decode(self._runner, self._make(), key)
            return _Prefill(self._runner, self._make, key, self._decode.sizes[-1])
        except RuntimeError as error:
            what = type(self._runner.model).__name__
            raise ValueError(
                f"{what}: a step of {key} can't be captured ({error}); set graphs=False."
            ) from error

    def _drop_if_stale(self) -> None:
        now = self._addresses()
        if now != self._stamp:
            self.stats.dropped += len(self._graphs)
            self._graphs.clear()
            self._stamp = now

    def _addresses(self) -> tuple[Any, ...]:
        model: Any = self._runner.model
        tensors = [*self._runner.pages.planes, *model.parameters(), *model.buffers()]
        return (self.adapter, *((one.data_ptr(), one.shape, one.dtype) for one in tensors))


class _Decode:
    """One graph of a whole pass."""

    def __init__(self, runner: ModelRunner, graph: Graph, key: GraphKey) -> None:
        buffers = PaddedDecode(runner.pages, key, runner.dtype, runner.device)
        self._buffers, self._graph = buffers, graph
        keep = torch.arange(key.rows, device=runner.device)

        def once() -> Tensor:
            with running(buffers):
                return forward(runner.model, buffers.token_ids, buffers.positions, keep)

        once()  # libraries set themselves up at their first call, which can't be captured
        with recording(graph):
            self._logits = once()

    def replay(self, inputs: StepInputs) -> Tensor:
        self._buffers.fill(inputs)
        self._graph.replay()
        return self._logits[: len(inputs.token_ids)].clone()


class _Prefill:
    """A pass in pieces, with attention by itself between them."""

    def __init__(
        self, runner: ModelRunner, make: Callable[[], Graph], key: GraphKey, most_samples: int
    ) -> None:
        self._pages = runner.pages
        self._ids = torch.zeros(key.rows, dtype=torch.int64, device=runner.device)
        self._positions = torch.zeros_like(self._ids)
        # The head takes rows by number, so that its shape is fixed too; row 0 is the padding.
        self._keep = torch.zeros(most_samples, dtype=torch.int64, device=runner.device)
        self._pieces = Pieces(make)

        def once() -> Tensor:
            return forward(runner.model, self._ids, self._positions, self._keep)

        with running(self._pieces):
            once()
            self._logits = self._pieces.capture(once)

    def replay(self, inputs: StepInputs) -> Tensor:
        count, samples = len(inputs.token_ids), len(inputs.sampled_rows)
        for buffer, new in (
            (self._ids, inputs.token_ids),
            (self._positions, inputs.positions),
            (self._keep, inputs.sampled_rows),
        ):
            buffer.zero_()
            buffer[: len(new)].copy_(new)
        self._pieces.replay(LayoutAttention(self._pages, inputs.layout, inputs.slots), count)
        return self._logits[:samples].clone()
