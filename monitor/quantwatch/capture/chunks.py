"""Pieces of a prompt that is too long to go through the models at once.

A trace holds every tap's hidden states, so a prompt of 32,768 tokens would take 128 times the
memory of one of 256. In chunks each model keeps its keys and values and nothing else: what a chunk
leaves is compared, handed on and forgotten.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from quantwatch.domain import Prompt


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` … `stop` − 1 of a prompt whose earlier tokens went through before."""

    prompt: Prompt
    """The whole prompt."""
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether nothing went before it: what a model does on it needs no cache."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.stop == len(self.prompt.token_ids)

    @cached_property
    def piece(self) -> Prompt:
        """The chunk as a prompt, scored from its own first scored position on (at most its end)."""
        start = min(max(self.prompt.score_start - self.start, 0), self.stop - self.start)
        ids = self.prompt.token_ids[self.start : self.stop]
        return replace(self.prompt, token_ids=ids, score_start=start, pieces=(), text=None)

    @property
    def following(self) -> int:
        """The id of the token behind it, −1 behind the last one."""
        return -1 if self.is_last else self.prompt.token_ids[self.stop]


def chunks_of(prompt: Prompt, size: int) -> Iterator[Chunk]:
    """Yield a prompt's chunks of `size` tokens, the last one shorter. Raises ValueError below 1."""
    if size < 1:
        raise ValueError(f"a chunk of {size} tokens; allowed: 1 or more")
    length = len(prompt.token_ids)
    for start in range(0, length, size):
        yield Chunk(prompt, start, min(start + size, length))


def goes_in_chunks(prompt: Prompt, size: int | None) -> bool:
    """Say whether a prompt is longer than what goes through at once; None: everything does."""
    return size is not None and len(prompt.token_ids) > size
