"""Records of `overview`: how each check stands. Frozen, no session behind them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from quantwatch.domain import Json, RunStatus, Severity, Verdict
from quantwatch.store.checks import Pause
from quantwatch.store.records import RunSummary
from quantwatch.store.timetables import Timetable


@dataclass(frozen=True, slots=True)
class Headline:
    """Mean output KL of one candidate in one run. `value` is None unless `kind` is `finite`."""

    candidate: str
    value: float | None
    kind: str
    se: float | None
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class RecentRun:
    """One of a check's newest ended runs. Without results it has no headlines."""

    run_id: str
    started_at: datetime
    headlines: tuple[Headline, ...]
    floor: float | None
    """Noise floor of the output KL in that run."""


@dataclass(frozen=True, slots=True)
class UnendedRun:
    """A run that waits or is under way. `tokens_total` is 0 until it is known."""

    run_id: str
    check: str
    status: RunStatus
    stage: str | None
    tokens_done: int
    tokens_total: int
    trigger: str
    actor: str | None
    device: str | None
    attempt: int
    queued_at: datetime | None
    started_at: datetime
    heartbeat_at: datetime | None
    lease_until: datetime | None
    cancel_requested_at: datetime | None


@dataclass(frozen=True, slots=True)
class OpenAlerts:
    """How many alerts of a check are open. `severity` is the worst of those that fire."""

    firing: int = 0
    acknowledged: int = 0
    pending: int = 0
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class CheckState:
    """One check as it stands. `newest` is its newest ended run (cancelled ones count, skipped slots
    don't), `latest` the newest that says something (cancelled ones don't), `decided` the newest
    succeeded one.

    `config` is what was applied last, else what its newest run was told; {} without either.
    """

    check: str
    config: Json
    in_use: bool
    newest: RunSummary | None
    latest: RunSummary | None
    decided: RunSummary | None
    since: datetime | None
    """When the first of the runs in a row with the verdict of `decided` began."""
    last_success_at: datetime | None
    unhealthy_runs: int
    pause: Pause | None
    quarantined_at: datetime | None
    timetable: Timetable | None
    unended: tuple[UnendedRun, ...]
    alerts: OpenAlerts
    recent: tuple[RecentRun, ...]
    """Oldest first."""
    baseline_run_id: str | None
    baseline: Mapping[str, Headline]
    """The baseline run's headline by candidate; {} without a baseline or without its results."""

    differs: tuple[str, ...] = ()
    """What keeps `decided` from being compared with the baseline run: suite, reference, …"""

    @property
    def paused_at(self) -> datetime | None:
        """Since when it is paused."""
        return None if self.pause is None else self.pause.at
