"""What the monitor could have seen tonight, and whether it saw what was planted for it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from quantwatch.domain.words import Scope

NO_BASELINE = "there is no baseline to compare with"
"""Why a rule on a baseline finds nothing where a run has none."""


@dataclass(frozen=True, slots=True)
class Detectable:
    """The smallest change for the worse that one rule of one candidate finds, at its worst place.

    In the unit of the rule's metric. Of all scopes that the rule judges, the one where most is
    needed: at the others less is enough.
    """

    rule: str
    metric: str
    statistic: str
    scope: Scope | None
    """None when nothing was measured where the rule looks."""
    num_scopes: int
    expected: float | None
    """What an unchanged night reads there: the baseline's value, or without one tonight's."""
    limit: float | None
    """Beyond it the rule breaches; the rule's own threshold, or what an interval has to clear."""
    value: float | None
    """By how much it has to get worse to be found in `power` of all nights; None: never found."""
    power: float
    reason: str = ""
    """Why no change would be found, however large."""


CanaryState = Literal["measured", "not measurable"]


@dataclass(frozen=True, slots=True)
class Canary:
    """One planted fault of known size, judged like a candidate and kept away from its figures."""

    candidate: str
    """Whose copy carried it, and whose rules judged it."""
    of: str
    """candidate or reference: what was copied."""
    turn: int
    """How many canaries of the check came before it: the place rotates with it."""
    fault: str
    size: float
    place: Scope | None
    channel: int | None
    """Output channel, of a fault in one channel."""
    made_at: datetime
    seconds: float
    state: CanaryState
    found: bool | None = None
    """Whether a rule breached that does not breach without the fault."""
    located: bool | None = None
    """Whether `named` is the place, encloses it, or (of a fault in a whole layer) lies inside."""
    named: Scope | None = None
    """Where the monitor says that it is."""
    rule: str | None = None
    scope: Scope | None = None
    value: float | None = None
    threshold: float | None = None
    """Of the breach that shows it: rule, where, what was measured, its limit."""
    reason: str = ""

    @property
    def is_blind(self) -> bool:
        """Whether the monitor looked and did not see it, or saw it in another place."""
        return self.state == "measured" and not (self.found and self.located)
