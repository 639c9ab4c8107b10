"""A decode of fixed shapes: buffers that a captured pass reads, and attention over them.

R rows read up to K keys each. `slots` [R, K] lists where a request's tokens are, slot 0 (in the
null block, zero) for what isn't there; the mask says which a query sees, by position: so one list
serves full and sliding layers alike. A padding row is token 0 at position 0 that sees slot 0 only
and writes into the null block's last slot.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from quantwatch_kernels.serve.engine.attend import attend
from quantwatch_kernels.serve.engine.buckets import GraphKey
from quantwatch_kernels.serve.engine.interface import AttentionCall
from quantwatch_kernels.serve.engine.layout import Part
from quantwatch_kernels.serve.engine.pages import Pages
from quantwatch_kernels.serve.engine.runner import StepInputs

__all__ = ["PaddedDecode"]


class PaddedDecode:
    """Answers the attention of a padded decode; all rows are padding at first."""

    def __init__(
        self, pages: Pages, key: GraphKey, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._pages, self._dtype, self._padding_slot = pages, dtype, pages.page_size - 1
        self.token_ids = torch.zeros(key.rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.token_ids)
        self._writes = torch.full_like(self.token_ids, self._padding_slot)
        self._reads = torch.zeros(key.rows, key.keys, dtype=torch.int64, device=device)
        self._all = torch.arange(key.rows, device=device)
        self._head_rows: dict[int, Tensor] = {}
        self._masks: dict[int | None, Tensor] = {}

    def fill(self, inputs: StepInputs) -> None:
        """Put a batch into the buffers; what it doesn't reach becomes padding."""
        count = len(inputs.token_ids)
        slots = pad_sequence([row.slots for row in inputs.layout.rows], batch_first=True)
        new = ((self.token_ids, inputs.token_ids, 0), (self.positions, inputs.positions, 0))
        for buffer, values, padding in (*new, (self._writes, inputs.slots, self._padding_slot)):
            buffer.fill_(padding)
            buffer[:count].copy_(values)
        self._reads.zero_()
        # −1 is a page that a window has dropped: no query sees it.
        self._reads[:count, : slots.shape[1]].copy_(slots.clamp_min(0))
        for heads, rows in self._head_rows.items():
            rows.copy_(self._rows_of(heads))
        for window, mask in self._masks.items():
            mask.copy_(self._mask_of(window))

    def attention(self, call: AttentionCall) -> Tensor:
        """Store the new keys and values; return [R, Hq, Dv]."""
        heads, window = call.keys.shape[1], call.rule.window
        # Made in the pass before the one that is captured, then filled in place.
        if heads not in self._head_rows:
            self._head_rows[heads] = self._rows_of(heads)
        if window not in self._masks:
            self._masks[window] = self._mask_of(window)
        self._pages.write(call.layer, self._writes, call.keys, call.values)
        keys, values = self._pages.read(call.layer, self._head_rows[heads])
        part = Part(
            self._all, len(self._all), self._head_rows[heads], self._masks[window], causal=False
        )
        return attend(call.queries, keys, values, part, call.rule)

    def _rows_of(self, heads: int) -> Tensor:
        head = torch.arange(heads, device=self._reads.device)[:, None]
        return (self._reads[:, None] * heads + head).contiguous()

    def _mask_of(self, window: int | None) -> Tensor:
        own = self.positions[:, None]
        keys = torch.arange(self._reads.shape[1], device=self._reads.device)
        seen = keys <= own
        if window is not None:
            seen &= keys > own - window
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return mask.masked_fill_(~seen, -torch.inf)[:, None, None]
