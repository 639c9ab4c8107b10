"""One claimed run from its stored configuration to its end, whichever end that is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantwatch.config.load import parse
from quantwatch.config.roots import read_inside
from quantwatch.config.schema import CacheConfig, CheckConfig
from quantwatch.domain import RunEvent, RunResult
from quantwatch.errors import LeaseLostError
from quantwatch.observability import logs
from quantwatch.observability.gpus import GpuWatch
from quantwatch.observability.tracing import span
from quantwatch.pipeline.claimed import run_claimed
from quantwatch.pipeline.holding import Silent
from quantwatch.pipeline.reasons import explain, peak_memory_bytes
from quantwatch.pipeline.request import RunRequest
from quantwatch.store import endings, leases
from quantwatch.store.attempts import Failure, note_usage
from quantwatch.store.endings import Tell
from quantwatch.store.leases import Claim
from quantwatch.worker.patience import insist

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from quantwatch.store.session import Database

log = logs.get(__name__)

Settle = Callable[["Session", RunResult, CheckConfig], None]
"""What else belongs to a succeeded run, inside its transaction."""
Measure = Callable[
    ["RunRequest", "Database", Claim, Callable[["Session", RunResult], None]], RunResult
]
"""Measures and stores a run; the pipeline's `run_claimed` but for tests."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run needs besides its own configuration."""

    cache_dir: Path
    roots: Sequence[Path] = ()
    """Folders that its paths must lie in; the configuration's own folder when empty."""
    reference_bytes: int = CacheConfig().reference_bytes
    """What recorded references may take of the disk."""
    settle: Settle | None = None
    tell: Tell | None = None


def perform(
    database: "Database", claim: Claim, around: Surroundings, measure: Measure | None = None
) -> bool:
    """Carry out a claimed run and end it: with results, or with a reason. Raises nothing of it.

    False when its end is not written down: the lease was lost, or the database stayed away.
    """
    retries = claim.attempt - 1
    with (
        logs.bound(run=claim.run_id, attempt=claim.attempt),
        span("run", claim.run_id, retries=retries, check=claim.check),
        GpuWatch() as gpus,
    ):
        try:
            leases.advance(database, claim, RunEvent.PREPARE)
            request, then = _request(claim, around), _then(claim, around, gpus)
            (measure or _measure)(request, database, claim, then)
            return True
        except LeaseLostError as error:
            log.warning("run taken away", reason=str(error))
            return False
        # Whatever it is: a run must not stay active because of it.
        except Exception as error:  # noqa: BLE001
            log.error("run ends without results", error)  # noqa: PLE1205 - no logging.Logger
            return _end(database, claim, explain(error), around, gpus)


def _end(
    database: "Database", claim: Claim, failure: Failure, around: Surroundings, gpus: GpuWatch
) -> bool:
    """Write the end down, patiently: what locked the database may be what ended the run."""

    def write() -> None:
        endings.conclude(database, claim, failure, around.tell)
        with database.writer() as session:
            usage = peak_memory_bytes(), gpus.summary()
            note_usage(session, claim.run_id, claim.number, *usage)

    return insist(write, claim)


def _request(claim: Claim, around: Surroundings) -> "RunRequest":
    """Rebuild what was asked for, recipe files as tables: they aren't read again.

    Raises ConfigError when it can't be read, or reads elsewhere.
    """
    origin, base_dir = f"configuration of run {claim.run_id}", Path(claim.base_dir)
    check = parse(CheckConfig, claim.config, origin)
    roots = around.roots or (base_dir.resolve(),)
    check = read_inside(check, base_dir, roots, ("checks", claim.check), origin)
    limit = around.reference_bytes
    return RunRequest(claim.check, check, base_dir, around.cache_dir, reference_bytes=limit)


def _then(
    claim: Claim, around: Surroundings, gpus: GpuWatch
) -> Callable[["Session", RunResult], None]:
    """Return what belongs to the transaction that ends a run with results."""

    def then(session: "Session", result: RunResult) -> None:
        usage = peak_memory_bytes(), gpus.summary()
        note_usage(session, claim.run_id, claim.number, *usage)
        if around.settle is not None:
            around.settle(session, result, parse(CheckConfig, claim.config, "run"))

    return then


def _measure(
    request: "RunRequest",
    database: "Database",
    claim: Claim,
    then: Callable[["Session", RunResult], None],
) -> RunResult:
    return run_claimed(request, database, claim, Silent(), then)
