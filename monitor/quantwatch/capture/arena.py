"""Memory that is used again for every batch: fresh memory costs a page fault per 4 KB, and a heap
that is torn up by batches of many sizes keeps what they freed."""

import torch
from torch import Tensor

from quantwatch.capture.batches import Batch


class Arena:
    """Named copies of one batch at a time: a name's next copy overwrites the one before."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, name: str, batch: Batch, tensor: Tensor, rows: Tensor | None = None) -> Tensor:
        """Copy the measured rows [R, ·] of a tensor that fits the batch, or only some of them."""
        count = batch.num_tokens if rows is None else len(rows)
        size = count * tensor.shape[-1]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or not _alike(buffer, tensor):
            with torch.inference_mode(False):  # an inference tensor can't be written to again
                buffer = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
            self._buffers[name] = buffer
        return batch.copy(tensor, rows, out=buffer[:size].view(count, -1))


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device
