"""Which rows of a batch are scored, what their targets are, and where the lens looks."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantwatch.capture.batches import Batch
from quantwatch.capture.chunks import Chunk
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.sampling import lens_positions
from quantwatch.domain import Prompt

Positions = NDArray[np.int64]
_DEFAULT_HEAD_POSITIONS = 8
"""Positions per 256 at which the head is compared when the lens is off."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of one batch. S scored rows over all its prompts, in order."""

    batch: Batch
    rows: Tensor
    """The measured rows that are scored, int64 [S]."""
    targets: Tensor
    """The next token's id, −1 behind the last token, int64 [S]."""
    spans: tuple[slice, ...]
    """Each prompt's part of the scored rows."""
    positions: tuple[Positions, ...]
    """Each prompt's sampled positions, of the lens and of the head."""
    suite_hash: str = ""
    """What is drawn at random is drawn by it."""

    def measured(self, number: int, positions: Positions) -> Tensor:
        """Return the measured rows of some positions of the batch's prompt `number`."""
        return torch.from_numpy(positions + self.batch.slices[number].start)

    def scored(self, number: int, positions: Positions) -> Tensor:
        """Return the scored rows of some positions of the batch's prompt `number`."""
        shift = self.spans[number].start - self.batch.prompts[number].score_start
        return torch.from_numpy(positions + shift)


def lay_out(batch: Batch, suite_hash: str, plan: CapturePlan) -> Layout:
    """Lay a batch out; the head is sampled at 8 positions of 256 when the lens is off."""
    if batch.chunk is not None:
        return _of_chunk(batch, batch.chunk, suite_hash, plan)
    rows, targets, spans, start = [], [], [], 0
    for prompt, where in zip(batch.prompts, batch.slices, strict=True):
        rows.append(torch.arange(where.start + prompt.score_start, where.stop))
        targets.append(_targets(prompt))
        spans.append(slice(start, start + prompt.num_scored))
        start += prompt.num_scored
    sampled = tuple(lens_positions(suite_hash, p, _per_256(plan)) for p in batch.prompts)
    return Layout(batch, torch.cat(rows), torch.cat(targets), tuple(spans), sampled, suite_hash)


def _of_chunk(batch: Batch, chunk: Chunk, suite_hash: str, plan: CapturePlan) -> Layout:
    """Lay a chunk out: sampled is what a pass over the whole prompt samples there."""
    piece = chunk.piece
    sampled = lens_positions(suite_hash, chunk.prompt, _per_256(plan))
    here = sampled[(sampled >= chunk.start) & (sampled < chunk.stop)] - chunk.start
    rows = torch.arange(piece.score_start, len(piece.token_ids))
    targets = _targets(piece, chunk.following)
    return Layout(batch, rows, targets, (slice(0, piece.num_scored),), (here,), suite_hash)


def _per_256(plan: CapturePlan) -> int:
    return plan.lens_positions or _DEFAULT_HEAD_POSITIONS


def _targets(prompt: Prompt, following: int = -1) -> Tensor:
    if not prompt.num_scored:
        return torch.empty(0, dtype=torch.int64)
    ids = (*prompt.token_ids[prompt.score_start + 1 :], following)
    return torch.tensor(ids, dtype=torch.int64)
