"""What each part of a candidate costs alone, and what to restore so that its check passes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from quantwatch.domain.words import Json, Scope, Verdict


@dataclass(frozen=True, slots=True)
class AttributedPart:
    """One part of the candidate put into the reference alone. KL in nats, means over tokens."""

    scope: Scope
    kind: str
    """embedding, layer, attention, mlp, linear, final norm or head."""
    is_whole: bool
    """Whether it is one of those that make up the model: attention and MLP are parts of a layer."""
    kl: float
    """KL(reference ‖ reference with this part)."""
    noise_kl: float
    """The same with noise of the size of the part's error in a random direction."""
    relative_error: float | None
    """Error of its output, fed what the reference feeds it; None: the reference's output is 0."""

    @property
    def direction(self) -> float | None:
        """KL ÷ noise KL: above 1 the error's direction hurts more than its size."""
        return self.kl / self.noise_kl if self.noise_kl else None


@dataclass(frozen=True, slots=True)
class Restoration:
    """The smallest set of parts, the costliest first, without which the check passes."""

    scopes: tuple[Scope, ...]
    """Empty: none is needed, or none is enough; `verdict` tells."""
    verdict: Verdict | None
    """Of an actual run with these restored; None where none that was tried passes."""
    kl: float | None
    """Its mean output KL over the whole suite, nats."""
    num_tries: int
    is_smallest: bool
    """Whether one part less was run, too, and doesn't pass."""
    words: str
    recipe: Json | None
    """The candidate's recipe with these parts left out."""

    @property
    def named(self) -> str | None:
        """What is to be restored; None where nothing that was tried is enough."""
        return None if self.verdict is None else ", ".join(self.scopes) or "nothing"


@dataclass(frozen=True, slots=True)
class Attribution:
    """The parts of one candidate of a run; see `AttributedPart`."""

    candidate: str
    made_at: datetime
    detail: str
    seed: int
    num_prompts: int
    num_tokens: int
    num_scored: int
    """Tokens that every mean is over."""
    kl: float
    """KL(reference ‖ candidate) on these tokens."""
    together_kl: float
    """… of all whole parts put into the reference at once."""
    num_boundaries: int
    """At how many the reference, with nothing swapped, was run again: its KL was 0 at each."""
    parts: tuple[AttributedPart, ...]
    """In the order of the model."""
    notes: tuple[str, ...] = ()
    restoration: Restoration | None = None

    @property
    def additivity(self) -> float | None:
        """Σ KL of the whole parts ÷ the candidate's KL; None where that is 0."""
        total = math.fsum(part.kl for part in self.parts if part.is_whole)
        return total / self.kl if self.kl else None

    def share(self, part: AttributedPart) -> float | None:
        """Return a part's share of the candidate's KL; None where that is 0."""
        return part.kl / self.kl if self.kl else None

    @property
    def ranked(self) -> Sequence[AttributedPart]:
        """The parts, the costliest first, equal ones in the order of the model."""
        return sorted(self.parts, key=lambda part: -part.kl)
