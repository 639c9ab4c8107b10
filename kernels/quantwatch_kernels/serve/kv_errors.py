"""How far codes move attention itself: scores and outputs, layer by layer added up.

    relative L2 error = √(Σ (found − true)² ÷ Σ true²)

over all layers, heads, queries and, for scores q·k, the keys that a query sees. Both sides get the
same queries, keys and values, those of the plain model: what is measured is the cache's error and
not what earlier layers made of theirs. A scale on all scores (1/√D) cancels. Sums are float64.
"""

import math

import torch
from torch import Tensor

__all__ = ["AttentionErrors"]


class AttentionErrors:
    """Sums of squares of errors and of true numbers."""

    def __init__(self) -> None:
        self._scores = [0.0, 0.0]
        self._outputs = [0.0, 0.0]

    @property
    def scores(self) -> float:
        """Relative L2 error of q·k. Raises ValueError if nothing was seen."""
        return _relative(self._scores)

    @property
    def outputs(self) -> float:
        """Relative L2 error of attention's outputs. Raises ValueError if nothing was seen."""
        return _relative(self._outputs)

    def add_scores(
        self,
        query: Tensor,
        keys: tuple[Tensor, Tensor],
        codes_read: Tensor | tuple[Tensor, Tensor],
        seen: Tensor,
    ) -> None:
        """Take in queries [B, Hq, T, D], keys exact and as codes say [B, Hkv, T, D].

        `codes_read` as `mixed_attention` takes it; `seen` bool, broadcasts to [B, Hq, T, T].
        """
        groups = query.shape[1] // keys[0].shape[1]
        reads = codes_read[0] if isinstance(codes_read, tuple) else codes_read
        if reads.ndim > 2:
            reads = reads.repeat_interleave(groups, 1)
        true, coded = (x.float().repeat_interleave(groups, 1) for x in keys)
        error = query.float() @ (coded - true).mT
        self._add(self._scores, error.where(seen & reads, 0.0), (query.float() @ true.mT) * seen)

    def add_outputs(self, found: Tensor, true: Tensor) -> None:
        """Take in outputs of the same shape."""
        self._add(self._outputs, found.float() - true.float(), true)

    def _add(self, sums: list[float], error: Tensor, true: Tensor) -> None:
        for place, x in enumerate((error, true)):
            sums[place] += float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _relative(sums: list[float]) -> float:
    if sums[1] == 0:
        raise ValueError("no attention was seen, so there is no error.")
    return math.sqrt(sums[0] / sums[1])
