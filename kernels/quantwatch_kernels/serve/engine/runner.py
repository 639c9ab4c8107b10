"""One flat batch through a transformers model: [1, T] token ids, positions, pages.

Each layer writes its new keys and values into their slots and then reads what its queries see, its
own keys among them. Logits are made only for tokens that something is sampled from.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quantwatch_kernels.serve.block_table import BlockTable
from quantwatch_kernels.serve.engine.attend import attend
from quantwatch_kernels.serve.engine.batch import Batch, Row
from quantwatch_kernels.serve.engine.interface import AttentionCall, running
from quantwatch_kernels.serve.engine.layout import Layout, Part, TextRow
from quantwatch_kernels.serve.engine.pages import Pages, copy_pages

__all__ = ["LayoutAttention", "ModelRunner", "Runner", "StepInputs", "forward", "step_inputs"]


class StepInputs:
    """What one step feeds to the model."""

    def __init__(self, rows: Sequence[Row], layout: Layout) -> None:
        ids = [token for row in rows for token in row.tokens]
        self.token_ids = torch.tensor(ids, device=layout.device)
        self.positions, self.slots, self.layout = layout.positions, layout.slots, layout
        ends = torch.tensor([len(row.tokens) for row in rows]).cumsum(0) - 1
        samples = torch.tensor([row.samples for row in rows])
        self.sampled_rows = ends[samples].to(layout.device)
        """int64 [n], places in the flat batch that logits are made of."""

    @property
    def decodes(self) -> bool:
        """Whether each request has one token, and something is sampled from each."""
        return len(self.token_ids) == len(self.sampled_rows)


class LayoutAttention:
    """Answers attention by a layout over pages."""

    def __init__(self, pages: Pages, layout: Layout, slots: Tensor) -> None:
        self._pages, self._layout, self._slots = pages, layout, slots

    def attention(self, call: AttentionCall) -> Tensor:
        """Store the new keys and values; return [T, Hq, Dv]."""
        self._pages.write(call.layer, self._slots, call.keys, call.values)
        parts = self._layout.parts(call.rule.window, call.keys.shape[1])
        shape = (len(call.queries), call.queries.shape[1], call.values.shape[2])
        if len(parts) == 1:  # all tokens, in order
            return self._answer(call, call.queries, parts[0])
        out = call.queries.new_empty(shape)
        for part in parts:
            mine = call.queries.index_select(0, part.tokens)
            out.index_copy_(0, part.tokens, self._answer(call, mine, part))
        return out

    def _answer(self, call: AttentionCall, queries: Tensor, part: Part) -> Tensor:
        keys, values = self._pages.read(call.layer, part.head_rows)
        return attend(queries, keys, values, part, call.rule)


def step_inputs(
    rows: Sequence[Row],
    tables: Mapping[str, BlockTable],
    dtype: torch.dtype,
    device: torch.device,
) -> StepInputs:
    """Return the inputs of a step whose slots are reserved."""
    texts = []
    for row in rows:
        end = row.start + len(row.tokens)
        slots = tables[row.name].slot_mapping(0, end)
        texts.append(TextRow(row.start, len(row.tokens), slots))
    return StepInputs(rows, Layout(texts, dtype, device))


def forward(model: Any, token_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
    """Return logits [n, V] of the tokens at `keep`."""
    # Written out: a model whose default is to return tuples would be read wrongly.
    out = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=keep,
        return_dict=True,
    )
    logits: Tensor = out.logits[0]
    return logits


class Runner(Protocol):
    """Whoever computes batches."""

    def run(self, batch: Batch, tables: Mapping[str, BlockTable]) -> Tensor:
        """Return the logits [n, V] of the rows that sample, in order."""


class ModelRunner:
    """Runs batches of a held model, eagerly."""

    def __init__(self, model: Any, pages: Pages) -> None:
        self.model, self.pages = model, pages
        self.dtype, self.device = model.dtype, model.device

    @torch.inference_mode()
    def run(self, batch: Batch, tables: Mapping[str, BlockTable]) -> Tensor:
        """Compute a batch; return the logits [n, V] of the rows that sample, in order."""
        copy_pages(self.pages, batch.copies)
        return self.compute(step_inputs(batch.rows, tables, self.dtype, self.device))

    def compute(self, inputs: StepInputs) -> Tensor:
        """Run the model on inputs; what a graph replaces."""
        with running(LayoutAttention(self.pages, inputs.layout, inputs.slots)):
            return forward(self.model, inputs.token_ids, inputs.positions, inputs.sampled_rows)
