"""What a changed model makes of the rest of the way: the layers behind a boundary, and the head.

The reference is walked layer by layer (`LayerWalk`); at each boundary its hidden states are at
hand, and whatever is changed behind them is run from there: half of a model per change on average,
and where nothing is changed its logits bit for bit, so that a KL of exactly 0 proves the method.
The reference's logits at the scored positions are kept, float32 [tokens, V] (0.2 GB for 1,024 and
49k ids); a changed model's are made and dropped one input at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantwatch_kernels.compare.output import output_statistics
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["Difference", "SuffixRun", "swapped"]


class Difference(NamedTuple):
    """How a changed model's logits differ from the reference's, means over the scored tokens."""

    kl: float
    """KL(reference ‖ changed), nats."""
    agreement_lost: float
    """Share of tokens whose likeliest next token changes."""
    accuracy_lost: float
    """Next-token accuracy, reference − changed; a last position has no next token."""


class SuffixRun:
    """The reference's logits on `inputs` [B, T], and what a changed model makes of the rest.

    `scored` are the positions [n] that count, per input; None: the second half but the last one.
    Raises ValueError as `LayerWalk` does, for positions outside an input, for inputs of fewer than
    4 tokens without positions, and where the reference's logits aren't finite.
    """

    def __init__(
        self, model: nn.Module, inputs: Sequence[Tensor], scored: Sequence[Tensor] | None = None
    ) -> None:
        """Run the reference once."""
        self.model = model
        self.walk = LayerWalk(model, inputs)
        self.scored = _second_halves(inputs) if scored is None else _checked(inputs, scored)
        self._reference = list(self._logits(self.walk))
        for number, logits in enumerate(self._reference):
            if not bool(torch.isfinite(logits).all()):
                raise ValueError(f"the reference's logits of input {number} aren't finite.")

    @property
    def num_scored(self) -> int:
        """How many tokens every mean is over."""
        return sum(len(logits) for logits in self._reference)

    def difference(self, *, from_start: bool = False) -> Difference:
        """Run the model as it is from the walk's position (or from its embedding) and compare."""
        walk = LayerWalk(self.model, self.walk.inputs) if from_start else self.walk
        rows = self._rows(walk)
        kl, agreed = rows[:2].mean(1).tolist()
        right, right_before = rows[2:].nanmean(1).tolist()  # NaN: no next token
        return Difference(kl, 1 - agreed, right_before - right)

    def kl(self, walk: LayerWalk | None = None) -> float:
        """Return the mean KL from the position of a walk (None: its own) over its inputs.

        They are the first of the run's, or all. NaN where a logit is NaN.
        """
        return float(self._rows(walk or self.walk)[0].mean())

    def _rows(self, walk: LayerWalk) -> Tensor:
        """Return KL, agreement, right, right before: float64 [4, scored]."""
        found = enumerate(self._logits(walk))
        return torch.cat([self._compare(number, logits) for number, logits in found], 1)

    def _logits(self, walk: LayerWalk) -> Iterator[Tensor]:
        # Layer after layer: one that is read from a file is then read once for all inputs.
        rest = walk.branch()
        for index in range(rest.position, len(rest.layers)):
            rest.run(index)
        for number, hidden in enumerate(rest.hidden):
            with torch.no_grad():
                found = rest.logits(number, hidden, self.scored[number]).flatten(0, 1).float()
            yield found

    def _compare(self, number: int, logits: Tensor) -> Tensor:
        ids = self.walk.inputs[number]
        ahead = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
        targets = ahead[:, self.scored[number]].flatten()
        statistics = output_statistics(
            self._reference[number],
            logits,
            targets,
            reference_dtype=torch.float32,
            candidate_dtype=torch.float32,
            keep=5,
        )
        none = targets < 0
        right = [
            (found[:, 0] == targets).double().masked_fill(none, torch.nan)
            for found in (statistics.candidate_ids, statistics.reference_ids)
        ]
        rows = (statistics.logit_kl, statistics.top1_agreement, *right)
        return torch.stack([row.double() for row in rows])


def _second_halves(inputs: Sequence[Tensor]) -> list[Tensor]:
    short = min(ids.shape[1] for ids in inputs)
    if short < 4:
        raise ValueError(f"inputs need at least 4 tokens; one has {short}.")
    return [torch.arange(i.shape[1] // 2, i.shape[1] - 1, device=i.device) for i in inputs]


def _checked(inputs: Sequence[Tensor], scored: Sequence[Tensor]) -> list[Tensor]:
    if len(scored) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs need as many scored positions, not {len(scored)}.")
    for number, (ids, places) in enumerate(zip(inputs, scored, strict=True)):
        length = ids.shape[1]
        if not places.numel() or int(places.min()) < 0 or int(places.max()) >= length:
            raise ValueError(
                f"scored positions of input {number} must be some of 0 … {length - 1}; "
                f"they are {places.tolist()}."
            )
    return list(scored)


@contextmanager
def swapped(parts: Sequence[Layer], values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the parts' weights [N, K] are `values`; then what they were, bit for bit."""
    kept = [part.weight.clone() for part in parts]
    try:
        _write(parts, values)
        yield
    finally:
        _write(parts, kept)


def _write(parts: Sequence[Layer], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for part, value in zip(parts, values, strict=True):
            part.weight.copy_(value)
