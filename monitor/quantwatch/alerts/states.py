"""What an alert remembers between runs, and what can happen to it."""

from dataclasses import dataclass
from enum import StrEnum

from quantwatch.domain import Severity


class State(StrEnum):
    """Where an alert is."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RECOVERING = "recovering"

    @property
    def is_told(self) -> bool:
        """Whether somebody was to be told: the episode has fired and is not resolved."""
        return self in (State.FIRING, State.RECOVERING)


class Effect(StrEnum):
    """What happened to an alert, in the order of `Step.effects`."""

    OPENED = "opened"
    """An episode begins, nobody is told yet."""
    CONFIRM = "confirm"
    """A confirmation run is to be queued."""
    FIRED = "fired"
    ESCALATED = "escalated"
    RECOVERING = "recovering"
    RESOLVED = "resolved"
    DROPPED = "dropped"
    """An episode that never fired ends; nobody is told."""


class Reason(StrEnum):
    """Why an episode ended."""

    RECOVERED = "recovered"
    RULE_CHANGED = "rule_changed"
    RULE_DELETED = "rule_deleted"
    SERIES_MISSING = "series_missing"
    BASELINE_MOVED = "baseline_moved"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class AlertState:
    """Everything that an alert remembers between runs."""

    state: State = State.INACTIVE
    severity: Severity | None = None
    """The highest of the open episode."""
    num_breaches: int = 0
    """Runs that breached, in a row or among the last n, while pending."""
    num_clear: int = 0
    """Runs in a row beyond the leave threshold, while recovering."""
    num_missing: int = 0
    """Runs in a row without the series, while open."""
    rule_sha: str | None = None
    window: int = 0
    """Which of the last runs breached (alerts/windows.py), while pending by m of n."""
    awaits: str | None = None
    """The run whose confirmation it waits for."""


@dataclass(frozen=True, slots=True)
class RunRef:
    """The run that an outcome is of."""

    run_id: str
    confirms: str | None = None
    """The run that this one was queued to confirm."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the check's `alerting` section says of all its rules."""

    confirm: bool = True
    missing_runs: int = 2


@dataclass(frozen=True, slots=True)
class Step:
    """An alert's next state and what happened on the way. `reason` is of a closed episode."""

    state: AlertState
    effects: tuple[Effect, ...] = ()
    reason: Reason | None = None
