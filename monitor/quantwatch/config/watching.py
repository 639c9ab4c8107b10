"""How a check is watched over time: its schedule, its baseline, how it alerts."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from quantwatch.config.base import Name, Strict
from quantwatch.config.durations import Duration, PositiveDuration, seconds
from quantwatch.schedules import parse_cron, parse_zone


def _parsed_by(parse: Callable[[str], str]) -> AfterValidator:
    """Refuse what can't be parsed; keep the text as it is written."""

    def checked(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(checked)


CronText = Annotated[str, _parsed_by(parse_cron)]
ZoneName = Annotated[str, _parsed_by(parse_zone)]


class ScheduleConfig(Strict):
    """When a check runs. Exactly one of cron and every."""

    cron: CronText | None = Field(
        default=None,
        description='Five fields, e.g. "0 2 * * *"; Sunday is 0 or 7. Debian\'s rules at a change '
        "of the clocks: each local day once.",
    )
    every: PositiveDuration | None = Field(
        default=None, description="An interval of elapsed time instead, e.g. 6h."
    )
    zone: ZoneName = Field(default="UTC", description="IANA time zone of cron, e.g. Europe/Berlin.")
    grace: PositiveDuration = Field(
        default="6h",
        description="How late a slot may start, and how long after it a successful run is waited "
        "for before the dead-man alert.",
    )
    catch_up: Literal["latest", "none"] = Field(
        default="latest",
        description="After downtime: run the newest missed slot within grace, or none. Missed "
        "slots are recorded as skipped.",
    )
    jitter: Duration = Field(
        default="10m",
        description="Spread over this time, always the same for a check; the slot stays the "
        "nominal instant.",
    )
    deadline: PositiveDuration = Field(default="2h", description="Longest time one attempt takes.")
    attempts: int = Field(
        default=3, ge=1, le=10, description="Attempts of a run that is not to blame (1m, 5m, 15m)."
    )

    @model_validator(mode="after")
    def _one_of(self) -> "ScheduleConfig":
        if (self.cron is None) == (self.every is None):
            raise ValueError("exactly one of cron and every is required")
        return self


class BaselineConfig(Strict):
    """What a check's runs are compared with."""

    kind: Literal["pinned", "rolling", "best-ever"] = Field(
        default="pinned",
        description="pinned: the run that somebody pinned. rolling: the mean of the last runs that "
        "breached no baseline rule. best-ever: the run with the lowest output KL.",
    )
    window: int = Field(default=7, ge=1, le=90, description="Runs in a rolling baseline.")


class MaintenanceConfig(Strict):
    """A window in which alerts are kept but not told."""

    cron: CronText = Field(description="When it begins, five fields.")
    zone: ZoneName = Field(default="UTC", description="IANA time zone.")
    length: PositiveDuration = Field(description="How long it lasts.")


SHORTEST_REMINDER_S = 12 * 3600
LONGEST_WINDOW_S = 90 * 86400


class FlappingConfig(Strict):
    """When an alert comes and goes so often that it is said to flap."""

    firings: int = Field(
        default=4, ge=1, le=100, description="An alert that fired more often than this flaps."
    )
    within: PositiveDuration = Field(
        default="7d", description="In which time, up to now; 90d at most."
    )
    leave_factor: int = Field(
        default=2,
        ge=1,
        le=10,
        description="So many times leave_runs does one that flaps have to stay away before it is "
        "resolved; 1: it is shown, nothing else.",
    )

    @model_validator(mode="after")
    def _recent(self) -> "FlappingConfig":
        if seconds(self.within) > LONGEST_WINDOW_S:
            raise ValueError(f"within = {self.within!r} is too long; allowed: 90d or less")
        return self


class AlertingConfig(Strict):
    """How a check alerts."""

    endpoints: tuple[Name, ...] | None = Field(
        default=None, description="Endpoints that are told; all when absent."
    )
    confirm: bool = Field(
        default=True,
        description="A second run confirms before anybody is told: a critical breach, and whatever "
        "a baseline rule finds.",
    )
    reminder: PositiveDuration | None = Field(
        default=None, description="Tell again while it fires, 12h at least."
    )
    missing_runs: int = Field(
        default=2, ge=1, description="Runs without a series before its alert is closed."
    )
    unhealthy_runs: int = Field(
        default=2, ge=1, description="Failed runs in a row before the check is called unhealthy."
    )
    flapping: FlappingConfig = Field(
        default_factory=FlappingConfig, description="When an alert flaps, and what follows."
    )
    maintenance: tuple[MaintenanceConfig, ...] = Field(
        default=(), description="Windows without messages."
    )

    @model_validator(mode="after")
    def _seldom(self) -> "AlertingConfig":
        if self.reminder is not None and seconds(self.reminder) < SHORTEST_REMINDER_S:
            raise ValueError(f"reminder = {self.reminder!r} is too often; allowed: 12h or more")
        return self
