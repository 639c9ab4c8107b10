"""What became of a rule in earlier runs: what an alert that ended is compared with."""

from dataclasses import dataclass
from datetime import datetime

from quantwatch.domain.words import Scope


@dataclass(frozen=True, slots=True)
class Judged:
    """One rule's outcome in one earlier run."""

    run_id: str
    outcome: str
    moment: datetime
    """When it was judged; an alert that a run moves has moved at this very instant."""
    confirms: bool
    """Whether the run was a confirmation run: the same night as the run before."""
    breached: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class Ended:
    """An episode that fired and ended on its values, or by somebody's hand."""

    opened_at: datetime
    fired_at: datetime
    resolved_at: datetime
    by_hand: bool
