"""The process of one run: `python -m quantwatch.worker.child`, its job on standard input."""

import json
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quantwatch.config.load import parse
from quantwatch.config.schema import Config
from quantwatch.observability import logs, redaction, tracing
from quantwatch.store.leases import find_claim
from quantwatch.store.session import Database, open_database
from quantwatch.store.urls import parse_url
from quantwatch.worker.hooks import settling, telling
from quantwatch.worker.performing import Surroundings, perform

ORPHANED = 75
"""Exit code when the worker is gone: a service that is killed leaves nothing behind."""


def main() -> None:
    """Carry out the run named on standard input; how it ended stands in the database."""
    logs.configure(logs.wanted_form("json"), everything=True)
    job: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    with ExitStack() as stack:
        if (exporter := tracing.start()) is not None:
            stack.callback(exporter.stop)
        database = _open(job["database"])
        stack.callback(database.close)
        claim = find_claim(database, job["run_id"], job["token"], job["lease_s"])
        perform(database, claim, _surroundings(job))


def _open(url: str) -> Database:
    password = parse_url(url).password
    if password is not None:
        redaction.register(password)
    return open_database(url)


def _surroundings(job: dict[str, Any]) -> Surroundings:
    service = parse(Config, job["service"], "configuration of the service")
    roots = tuple(Path(root) for root in job["roots"])
    return Surroundings(Path(job["cache_dir"]), roots, settling(service), telling(service))


def _end_with_parent() -> None:
    """Wait for the end of the pipe that the worker holds, and end at once."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
