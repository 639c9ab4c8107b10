"""The process of one run: `python -m quantwatch.worker.child`, its job on standard input."""

import json
import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantwatch.config.load import parse
from quantwatch.config.schema import Config
from quantwatch.errors import LeaseLostError, StoreError
from quantwatch.observability import logs, redaction, tracing
from quantwatch.store import endings, leases
from quantwatch.store.attempts import Failure
from quantwatch.store.leases import Claim, Report
from quantwatch.store.session import Database, open_database
from quantwatch.store.urls import parse_url
from quantwatch.worker.exits import GAVE_UP, NO_DATABASE, ORPHANED, STOP_SIGNALS
from quantwatch.worker.hooks import settling, telling
from quantwatch.worker.patience import insist

if TYPE_CHECKING:
    from quantwatch.worker.performing import Surroundings

log = logs.get(__name__)


def main() -> None:
    """Carry out the run named on standard input; how it ended stands in the database.

    Where it can't stand there, the exit code says so. Signals that stop a service are the worker's
    to heed: systemd sends them to every process.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    logs.configure(logs.wanted_form("json"), everything=True)
    job: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    with ExitStack() as stack:
        if (exporter := tracing.start()) is not None:
            stack.callback(exporter.stop)
        code = _exit_code(job, stack)
    sys.exit(code)


def _exit_code(job: dict[str, Any], stack: ExitStack) -> int:
    try:
        database = _open(job["database"])
        stack.callback(database.close)
        claim = leases.find_claim(database, job["run_id"], job["token"], job["lease_s"])
    except LeaseLostError as error:
        log.warning("run taken away", reason=str(error))
        return GAVE_UP
    except StoreError as error:
        log.error("the run can't be begun", error)  # noqa: PLE1205 - no logging.Logger
        return NO_DATABASE
    return 0 if _carry_out(database, claim, job) else GAVE_UP


def _carry_out(database: Database, claim: Claim, job: dict[str, Any]) -> bool:
    """Say whether the end is written down, or somebody else's to write."""
    try:
        # What comes now may take long on a busy machine: torch is imported.
        leases.heartbeat(database, claim, Report())
        from quantwatch.worker.performing import perform

        return perform(database, claim, _surroundings(job))
    except LeaseLostError as error:
        log.warning("run taken away", reason=str(error))
        return False
    # Whatever it is: the run must not wait for its lease to end, and this is no death of it.
    except Exception as error:  # noqa: BLE001
        log.error("the run can't be begun", error)  # noqa: PLE1205 - no logging.Logger
        failure = _trouble(error)
        return insist(lambda: endings.fail(database, claim, failure), claim)


def _trouble(error: Exception) -> Failure:
    """Return what the surroundings of a run did to it. It may be over in a minute."""
    code = "storage_error" if isinstance(error, StoreError | OSError) else "internal"
    text = redaction.scrub(f"its process could not begin: {type(error).__name__}: {error}")
    return Failure(code, text, type(error).__name__, retryable=True)


def _open(url: str) -> Database:
    password = parse_url(url).password
    if password is not None:
        redaction.register(password)
    return open_database(url)


def _surroundings(job: dict[str, Any]) -> "Surroundings":
    from quantwatch.worker.performing import Surroundings

    service = parse(Config, job["service"], "configuration of the service")
    roots = tuple(Path(root) for root in job["roots"])
    limit = service.cache.reference_bytes
    return Surroundings(Path(job["cache_dir"]), roots, limit, settling(service), telling(service))


def _end_with_parent() -> None:
    """Wait for the end of the pipe that the worker holds, and end at once."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
