"""The course of a night: its batches, and the prompts on which the noise floor is measured.

Derived from suite and plan alone, so that a stored reference can be looked up by it.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from quantwatch.capture.batches import Batch, plan_batches, regroup
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
    def batches(self) -> tuple[Batch, ...]:
        """All batches; every prompt is in one of them."""
        prompts, budget = self.suite.prompts, self.plan.batch_tokens
        return tuple(plan_batches(prompts, self.isolated, budget))

    @cached_property
    def floor(self) -> frozenset[int]:
        """Isolated prompts whose start is measured beside another text."""
        chosen = tuple(prompt for prompt in self.suite.prompts if prompt.index in self.isolated)
        fraction = self.plan.floor_fraction if chosen else 0.0
        return isolated_prompts(replace(self.suite, prompts=chosen), fraction)

    def number(self, batch: Batch) -> int:
        """Return a batch's number: that of its first prompt, which is in no other one."""
        return self._numbers[batch.prompts[0].index]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {batch.prompts[0].index: number for number, batch in enumerate(self.batches)}

    @property
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
        return batch.prompts[0].index in self.floor

    def floor_length(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the floor takes, from its start."""
        return min(prompt.score_start + self.plan.floor_tokens, len(prompt.token_ids))

    def beside(self, prompt: Prompt) -> Batch:
        """Return a batch of the floor: a prompt beside another text."""
        return regroup(prompt, self.suite.prompts, self.max_positions)

    def linear_rows(self, batch: Batch, layout: Layout) -> Tensor:
        """Return the rows of a batch's first prompt at which its linears are compared."""
        count = self.plan.isolated_positions
        at = stratified_positions(self.suite.hash, batch.prompts[0], count, "linears")
        return layout.measured(0, at)
