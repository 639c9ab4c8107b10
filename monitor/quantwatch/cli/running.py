"""One run from the command line: estimate, progress, result, exit code."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from quantwatch.cli.output import Delivery
from quantwatch.cli.progress import reporting
from quantwatch.cli.session import Session, cache_dir
from quantwatch.cli.streams import whisper
from quantwatch.errors import ResourceError
from quantwatch.report.repeat import COMPARE

if TYPE_CHECKING:
    from quantwatch.config.schema import CheckConfig
    from quantwatch.domain import RunResult
    from quantwatch.pipeline import Estimate, RunRequest

_FEW_S = 10


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a run is to be done, whatever it measures."""

    delivery: Delivery
    store: bool = True
    sure: bool = False
    baseline: Path | None = None


def run(
    session: Session, name: str, check: "CheckConfig", base_dir: Path, wishes: Wishes
) -> NoReturn:
    """Run a check, deliver its result, and exit with its code."""
    from quantwatch.alerts.exit_codes import exit_code
    from quantwatch.baselines.files import import_run, import_sums
    from quantwatch.pipeline import RunRequest, look_up_named

    baseline = None if wishes.baseline is None else import_run(wishes.baseline)
    sums = () if wishes.baseline is None else import_sums(wishes.baseline)
    limit = session.cache().reference_bytes
    request = RunRequest(name, check, base_dir, cache_dir(), baseline, sums, limit)
    if name == COMPARE:
        # What was typed here is the user's to get right, not a failed run of the monitor.
        look_up_named(request)
    result = execute(session, request, store=wishes.store, sure=wishes.sure)
    wishes.delivery.deliver(result)
    raise typer.Exit(exit_code(result))


def execute(session: Session, request: "RunRequest", *, store: bool, sure: bool) -> "RunResult":
    """Say what the run will take, run it, and return its result."""
    from quantwatch.pipeline import estimate, run_check

    announce(estimate(request), sure=sure)
    opened = session.writer() if store else nullcontext()
    with opened as database, reporting() as progress:
        return run_check(request, database=database, progress=progress)


def announce(expected: "Estimate", *, sure: bool) -> None:
    """Print the estimate. Raises ResourceError when memory won't suffice and nobody said --yes."""
    from quantwatch.report.numbers import plural

    need, free = expected.memory_bytes, expected.free_bytes
    memory = "unknown memory" if need is None else f"{_gigabytes(need)} of memory"
    if expected.more_caches:
        memory = f"{memory} and KV caches"
    tokens = "" if expected.num_tokens is None else f", {plural(expected.num_tokens, 'token')}"
    time = "" if expected.seconds is None else f", {_duration(expected.seconds)}"
    said = f"{memory} ({_gigabytes(free)} free){tokens}{time}"
    disk = expected.recorded_bytes
    recorded = (
        "" if disk is None else f"; {_gigabytes(disk)} of disk for the reference, or less time"
    )
    once = "" if disk is None else " where it is recorded already"
    whisper(f"estimate: {said}{recorded}{once}")
    if need is not None and need > free and not sure:
        raise ResourceError(f"the run needs {said}; free some memory or add --yes to try anyway")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _duration(seconds: float) -> str:
    # Loading takes some seconds, too, which depend on the disk more than on anything known here.
    if seconds < _FEW_S:
        return "a few seconds"
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
