"""What a capture measures, as a value: part of what makes two runs comparable."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

from quantwatch.config.lens import Products
from quantwatch.domain import Suite
from quantwatch.telemetry import canonical_sha

VERSION = 2
"""Raised whenever capture would give other numbers for the same models and plan."""

_OF_ESTIMATES = ("lens", "sketch_top", "sketch_draws")


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Budgets of a capture. `sha` is equal exactly when two captures measure the same things."""

    lens_positions: int = 8
    """Positions per 256 scored tokens at which every layer is read through the lens; 0: off."""
    isolated_fraction: float = 0.125
    """Share of the scored tokens (whole prompts) on which isolated errors are measured; 0: off."""
    isolated_positions: int = 16
    """Positions per isolated prompt at which each linear is compared; modules are at all."""
    floor_fraction: float = 0.5
    """Share of the isolated tokens (whole prompts, at least one) on which the floor is measured."""
    floor_tokens: int = 128
    """Tokens of each such prompt, from its start: nothing later can change what came before."""
    condition_tokens: int = 16
    """Tokens of one such prompt on which the floor's other conditions are measured; 0: off."""
    worst_positions: int = 1
    """Positions per prompt with the largest final KL that are read too and never averaged."""
    batch_tokens: int = 256
    """Padded tokens per batch; a prompt is never split."""
    keep_top: int = 10
    """Logits kept per position and model for the top-k view."""
    prefill_chunk: int | None = None
    """Tokens per chunk of a prompt that is longer; None: every prompt goes through at once."""
    lens: Literal["sampled", "estimated"] = "sampled"
    """estimated: beside the sample, every layer's KL at every scored position is estimated."""
    lens_products: Products = "float32"
    """In what the lens multiplies hidden states with the head; all but float32 are faster."""
    sketch_top: int = 64
    """Largest lens logits of the reference that the estimate keeps."""
    sketch_draws: int = 96
    """Ids that it draws from the rest."""

    def __post_init__(self) -> None:
        if self.lens == "estimated" and not self.lens_positions:
            raise ValueError("estimates are held against lens_positions, which is 0")
        if self.lens == "estimated" and self.lens_products != "float32":
            raise ValueError("estimates are held against an exact sample, in float32 products")

    @property
    def rounds_lens(self) -> bool:
        """Whether anything is read through a lens that rounds what it multiplies to 16 bits."""
        return self.lens_products != "float32" and self.lens_positions > 0

    @property
    def sha(self) -> str:
        """SHA-256 of plan and capture version; what isn't used leaves it as it always was."""
        unused = set[str]() if self.lens == "estimated" else set(_OF_ESTIMATES)
        unused |= {"prefill_chunk"} if self.prefill_chunk is None else set()
        unused |= set() if self.rounds_lens else {"lens_products"}
        used = {name: value for name, value in asdict(self).items() if name not in unused}
        return canonical_sha({**used, "version": VERSION})

    def over(self, suite: Suite) -> "CapturePlan":
        """Return the plan as it is on a suite: without a chunk when no prompt is longer than it."""
        longest = max(len(prompt.token_ids) for prompt in suite.prompts)
        unused = self.prefill_chunk is None or longest <= self.prefill_chunk
        return replace(self, prefill_chunk=None) if unused else self
