"""What queries return to pages and commands: small frozen records, no session behind them."""

from dataclasses import dataclass
from datetime import datetime

from quantwatch.domain import RunStatus, Verdict


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of a list of runs. A candidate's verdict is None when it could not be measured."""

    run_id: str
    check: str
    status: RunStatus
    verdict: Verdict | None
    started_at: datetime
    finished_at: datetime | None
    suite_name: str
    num_tokens: int
    candidates: tuple[tuple[str, Verdict | None], ...]
    num_alerts: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One statistic of one candidate in one run. `value` is None unless `kind` is `finite`.

    `kind` is `finite`, `nan`, `posinf`, `neginf` or `missing` (the candidate was not measured).
    """

    run_id: str
    started_at: datetime
    candidate: str
    value: float | None
    kind: str
    verdict: Verdict | None
    se: float | None = None
    """Standard error of the mean."""
    floor: float | None = None
    """Noise floor of the metric at that scope, in that run."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One stored block without its values. `prompt` is None for blocks over all prompts."""

    kind: str
    metric: str
    prompt: int | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """One prompt as kept. Pieces and text are None where the check must not keep its text."""

    index: int
    category: str
    source: str
    num_tokens: int
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...] | None
    text: str | None
    score_start: int
