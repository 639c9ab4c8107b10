"""What the scheduler is given and gives: limits, batches, counts."""

from dataclasses import dataclass

from quantwatch_kernels.serve.block_pool import Writable

__all__ = ["Batch", "Limits", "Row", "SchedulerStats"]


@dataclass(slots=True)
class Limits:
    """How much is computed at a time; `max_running` may change between steps."""

    max_batch_tokens: int = 512
    max_running: int = 8
    reserve: float = 0.05
    """Share of the pool that admission leaves free while anybody runs."""

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1; it is {self.max_running}.")
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; with {self.max_running} running "
                "requests it must be at least as many, one token each."
            )
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve is a share, 0 … 1 without 1; it is {self.reserve}.")


@dataclass(frozen=True, slots=True)
class Row:
    """A request's part of a batch: tokens at positions start, start + 1, …"""

    name: str
    start: int
    tokens: tuple[int, ...]
    samples: bool
    """Whether the last token is the last known one, so that its logits say the next."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, and the pages to copy before anything is written."""

    rows: tuple[Row, ...] = ()
    copies: tuple[Writable, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the scheduler was made."""

    steps: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    """Tokens that needn't be computed because a page held them."""
    swapped: int = 0
    recomputed: int = 0
