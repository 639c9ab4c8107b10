"""Form batches of about equal work, and select the measured rows of what a model computes on them.

Shapes: B sequences, T padded width, R measured rows (all real tokens of the measured prompts), H.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from quantwatch.capture.chunks import Chunk
from quantwatch.domain import Prompt

PADDING_ID = 0
"""Any valid id does: positions behind a prompt are masked, never read and never measured."""
_EXTRA_WIDTH = 8


@dataclass(frozen=True)
class Batch:
    """Prompts that go through a model together, padded on the right.

    Companions only share the batch (the noise floor needs another composition): nothing is
    measured on them.
    """

    prompts: tuple[Prompt, ...]
    companions: tuple[tuple[int, ...], ...] = ()
    isolated: bool = False
    """Whether isolated errors are measured on it."""
    chunk: Chunk | None = None
    """Where the only prompt lies in a longer one whose earlier tokens are in the models' caches."""

    @cached_property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of every row: the prompts, then the companions."""
        return (*(prompt.token_ids for prompt in self.prompts), *self.companions)

    @cached_property
    def width(self) -> int:
        """Padded length T."""
        return max(len(ids) for ids in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Number of measured rows R."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_padding(self) -> int:
        """Number of padding tokens in the batch."""
        return self.width * len(self.sequences) - sum(len(ids) for ids in self.sequences)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Rows of each prompt among the measured rows."""
        ends = [0]
        for prompt in self.prompts:
            ends.append(ends[-1] + len(prompt.token_ids))
        return tuple(slice(a, b) for a, b in pairwise(ends))

    @cached_property
    def flat_index(self) -> Tensor:
        """Row numbers int64 [R] of the measured rows in the flattened [B·T]."""
        starts = range(0, len(self.prompts) * self.width, self.width)
        parts = zip(starts, self.prompts, strict=True)
        return torch.cat([torch.arange(a, a + len(p.token_ids)) for a, p in parts])

    def token_ids(self, device: torch.device) -> Tensor:
        """Return the padded token ids, int64 [B, T]."""
        rows = [ids + (PADDING_ID,) * (self.width - len(ids)) for ids in self.sequences]
        return torch.tensor(rows, device=device)

    def mask(self, device: torch.device) -> Tensor | None:
        """Return 1 for real tokens and 0 for padding, int64 [B, T]; None when nothing is padded."""
        if not self.num_padding:
            return None
        lengths = torch.tensor([len(ids) for ids in self.sequences], device=device)
        return (torch.arange(self.width, device=device) < lengths[:, None]).long()

    def fits(self, tensor: Tensor) -> bool:
        """Say whether a tensor has one row per token: [B, T, ·], [B, 1, T, ·] or [B·T, ·]."""
        count, width = len(self.sequences), self.width
        return tensor.shape[:-1] in ((count, width), (count, 1, width), (count * width,))

    def select(self, tensor: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the measured rows [R, ·] of a tensor that fits, or only some of them.

        The result may share memory with the tensor when every row is measured.
        """
        flat = tensor.reshape(-1, tensor.shape[-1])
        index = self.flat_index if rows is None else self.flat_index[rows]
        if len(index) == len(flat):
            return flat
        return flat.index_select(0, index.to(flat.device))

    def copy(self, tensor: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the selected rows in memory of their own."""
        selected = self.select(tensor, rows)
        shared = selected.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return selected.clone() if shared else selected


def plan_batches(prompts: Iterable[Prompt], isolated: frozenset[int], budget: int) -> list[Batch]:
    """Sort by length and fill batches up to `budget` padded tokens; a longer prompt goes alone.

    Prompts whose index is in `isolated` go alone too, so that nothing there is padded; what that
    does to the numbers is the noise floor, and plans with other shares are never compared.
    """
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.token_ids), prompt.index))
    batches, waiting = [], list[Prompt]()
    for prompt in ordered:
        if prompt.index in isolated:
            batches.append(Batch((prompt,), isolated=True))
            continue
        if waiting and len(prompt.token_ids) * (len(waiting) + 1) > budget:
            batches.append(Batch(tuple(waiting)))
            waiting = []
        waiting.append(prompt)
    return [*batches, Batch(tuple(waiting))] if waiting else batches


def regroup(prompt: Prompt, others: Sequence[Prompt], max_positions: int | None) -> Batch:
    """Return a batch in which a prompt is padded beside a longer text, to compare it with alone.

    The companion repeats the prompt that follows in the suite (itself in a suite of one). At the
    context's end it is shorter instead, so that at least the attention mask is there.
    """
    length = len(prompt.token_ids)
    following = [other for other in others if other.index > prompt.index] or list(others)
    source = following[0].token_ids
    wanted = length + _EXTRA_WIDTH
    if max_positions is not None and wanted > max_positions:
        wanted = max(1, length - _EXTRA_WIDTH)
    repeated = source * (wanted // len(source) + 1)
    return Batch((prompt,), (repeated[:wanted],), isolated=True)
