"""The course of a night: its batches, and the prompts on which the noise floor is measured.

Derived from suite and plan alone, so that a stored reference can be looked up by it.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from quantwatch.capture.batches import Batch, plan_batches, regroup
from quantwatch.capture.chunks import chunks_of, goes_in_chunks
from quantwatch.capture.layout import Layout
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.sampling import isolated_prompts, stratified_positions
from quantwatch.domain import Prompt, Suite


@dataclass(frozen=True)
class Course:
    """What is measured on one night, in this order."""

    suite: Suite
    plan: CapturePlan
    max_positions: int | None
    """The reference's context length."""

    @cached_property
    def isolated(self) -> frozenset[int]:
        """Prompts on which isolated errors are measured."""
        return isolated_prompts(self.suite, self.plan.isolated_fraction)

    @cached_property
    def long(self) -> tuple[Prompt, ...]:
        """Prompts that go in chunks, the shortest first."""
        size = self.plan.prefill_chunk
        found = [prompt for prompt in self.suite.prompts if goes_in_chunks(prompt, size)]
        return tuple(sorted(found, key=lambda prompt: (len(prompt.token_ids), prompt.index)))

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """All batches; every prompt is in one of them, or its chunks are batches in a row."""
        long = {prompt.index for prompt in self.long}
        short = [prompt for prompt in self.suite.prompts if prompt.index not in long]
        batches = plan_batches(short, self.isolated, self.plan.batch_tokens)
        for prompt in self.long:
            batches += self._chunks(prompt)
        return tuple(batches)

    def _chunks(self, prompt: Prompt) -> list[Batch]:
        """Return a prompt's chunks; isolated is the first, if any of it is scored."""
        found = []
        for chunk in chunks_of(prompt, self.plan.prefill_chunk or len(prompt.token_ids)):
            scored = chunk.is_first and chunk.piece.num_scored > 0
            isolated = scored and prompt.index in self.isolated
            found.append(Batch((chunk.piece,), isolated=isolated, chunk=chunk))
        return found

    @cached_property
    def floor(self) -> frozenset[int]:
        """Isolated prompts whose start is measured beside another text."""
        chosen = tuple(prompt for prompt in self.suite.prompts if prompt.index in self.isolated)
        fraction = self.plan.floor_fraction if chosen else 0.0
        return isolated_prompts(replace(self.suite, prompts=chosen), fraction)

    def number(self, batch: Batch) -> int:
        """Return a batch's number: that of its first prompt, or piece, which is in no other one."""
        return self._numbers[_name(batch)]

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        return {_name(batch): number for number, batch in enumerate(self.batches)}

    @cached_property
    def conditions(self) -> Prompt | None:
        """The few tokens on which the floor's other conditions are measured, if they are."""
        if not self.isolated or not self.plan.condition_tokens:
            return None
        prompts = [prompt for prompt in self.suite.prompts if prompt.index in self.isolated]
        best = min(prompts, key=lambda p: (p.score_start, -p.num_scored, p.index))
        end = best.score_start + self.plan.condition_tokens
        return replace(best, token_ids=best.token_ids[:end])

    def has_floor(self, batch: Batch) -> bool:
        """Say whether the noise floor is measured on a batch."""
        return batch.isolated and batch.prompts[0].index in self.floor

    def floor_length(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the floor takes, from its start; 0 if none counts.

        Of a prompt in chunks, that is in the first one.
        """
        size = self.plan.prefill_chunk
        if size is not None and goes_in_chunks(prompt, size):
            prompt = next(chunks_of(prompt, size)).piece
        count = min(prompt.score_start + self.plan.floor_tokens, len(prompt.token_ids))
        return count if prompt.num_scored else 0

    def beside(self, prompt: Prompt) -> Batch:
        """Return a batch of the floor: a prompt beside another text."""
        return regroup(prompt, self.suite.prompts, self.max_positions)

    def linear_rows(self, batch: Batch, layout: Layout) -> Tensor:
        """Return the rows of a batch's first prompt at which its linears are compared."""
        count = self.plan.isolated_positions
        at = stratified_positions(self.suite.hash, batch.prompts[0], count, "linears")
        return layout.measured(0, at)


def _name(batch: Batch) -> tuple[int, int]:
    return batch.prompts[0].index, 0 if batch.chunk is None else batch.chunk.start
