"""What a run says of where its reference came from."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from quantwatch.domain import Json

Origin = Literal["live", "recorded", "cache"]


@dataclass(frozen=True, slots=True)
class Audit:
    """A part that was computed again and held against what was stored, bit for bit."""

    part: str
    num_values: int
    num_differing: int
    largest: float | str
    """Largest difference of a stored number; "not finite" where that can't be said."""
    first: str | None
    """What differs first, None when nothing does."""

    @property
    def is_equal(self) -> bool:
        """Whether every bit is equal."""
        return self.num_differing == 0


@dataclass(slots=True)
class Use:
    """`capture.reference_cache` of a run."""

    origin: Origin = "live"
    """Computed in this run; computed and kept; read back."""
    is_wanted: bool = False
    """Whether the check has `reference_cache = true`."""
    key: str | None = None
    num_bytes: int | None = None
    num_tokens: int | None = None
    uses: int | None = None
    """How many nights have read it, with this one."""
    recorded_at: str | None = None
    audit: Audit | None = None
    floor_logit_kl: float | None = None
    """Nats: the store's own floor, the reference's live logits against those of the stored head
    input at some positions; None when no batch was held against it."""
    notes: list[str] = field(default_factory=list)
    """Why it is not from the cache; what was found damaged."""
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> Json:
        """Return it as plain JSON."""
        return asdict(self)
