"""What a server told of one prompt, as tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantwatch.models.served.answers import Position, Positions
from quantwatch.models.served.model import ServedModel
from quantwatch_kernels.compare.served import Told


@dataclass(frozen=True, slots=True)
class Answers:
    """One server's answers, and which positions they are of."""

    kept: Tensor
    """Which of the positions that it was asked for it answered, ascending."""
    told: Told
    """One row per such position."""
    dtype: torch.dtype

    @classmethod
    def of(cls, positions: Positions, model: ServedModel) -> "Answers":
        """Return a server's answers as tensors."""
        kept = [at for at, one in enumerate(positions) if isinstance(one, Position)]
        found = [one for one in positions if isinstance(one, Position)]
        top_k = model.terms.top_k
        ids = torch.tensor([one.ids for one in found], dtype=torch.int64).view(-1, top_k)
        logprobs = torch.tensor([one.logprobs for one in found], dtype=torch.float64)
        targets = [np.nan if one.target is None else one.target for one in found]
        target = torch.tensor(targets, dtype=torch.float64)
        told = Told(ids, logprobs.view(-1, top_k), target)
        return cls(torch.tensor(kept, dtype=torch.int64), told, model.terms.dtype)

    def within(self, first: int, stop: int) -> slice:
        """Return which of its answers are of positions `first` … `stop` − 1."""
        bounds = torch.tensor([first, stop])
        start, end = torch.searchsorted(self.kept, bounds).tolist()
        return slice(start, end)
