"""Where a run is carried out: in a process of its own, which may die without harm to others.

The job goes through standard input: a database URL may hold a password, which a command line
would show to everybody. The pipe stays open; when it ends, so does the child.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quantwatch.config.schema import Config
from quantwatch.store.leases import Claim

COMMAND = (sys.executable, "-P", "-m", "quantwatch.worker.child")
"""Without the current folder on the import path: what lies there is not ours."""


class Execution(Protocol):
    """A run that is being carried out somewhere."""

    ended: threading.Event

    def kill(self) -> None:
        """End it at once; `ended` follows."""

    def code(self) -> int:
        """Return its exit code once it has ended; negative is the signal that killed it."""


Start = Callable[[Claim], Execution]


@dataclass(frozen=True, slots=True)
class Children:
    """Carries out each run in a new process of this program."""

    database: str
    """URL, with its password."""
    cache_dir: Path
    roots: Sequence[Path] = ()
    """Folders that models and prompts must lie in; the check's own folder when empty."""
    service: Config = field(default_factory=lambda: Config(schema_version=1))
    """Who is told of alerts. Secrets are only named in it."""
    command: Sequence[str] = COMMAND

    def __call__(self, claim: Claim) -> "Child":
        """Start a process for a run that is held under the claim's token."""
        job = {
            "database": self.database,
            "run_id": claim.run_id,
            "token": claim.token,
            "lease_s": claim.lease_s,
            "cache_dir": str(self.cache_dir),
            "roots": [str(root) for root in self.roots],
            "service": self.service.model_dump(mode="json"),
        }
        return Child(self.command, job)


class Child:
    """One process and the thread that waits for its end."""

    def __init__(self, command: Sequence[str], job: dict[str, Any]) -> None:
        # A session of its own: Ctrl-C reaches the worker, which decides what becomes of the run.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self.ended = threading.Event()
        threading.Thread(target=self._attend, args=(job,), name="child", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """Kill it: SIGKILL, since nothing it could clean up outlives its transaction."""
        self._process.kill()

    def code(self) -> int:
        """Return its exit code, which there is once it has ended."""
        code = self._process.poll()
        if code is None:
            raise RuntimeError(f"process {self.pid} of a run still lives")
        return code

    def _attend(self, job: dict[str, Any]) -> None:
        """Send the job and wait for the end: a process that reads nothing blocks nobody else."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            # Dead before it has read all: its exit code says the rest.
            with contextlib.suppress(BrokenPipeError):
                pipe.write(json.dumps(job).encode() + b"\n")
                pipe.flush()
            self._process.wait()
            # What it left unread is tried once more, and the pipe is closed all the same.
            with contextlib.suppress(OSError):
                pipe.close()
        finally:
            self.ended.set()
