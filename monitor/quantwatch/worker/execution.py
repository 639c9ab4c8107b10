"""Where a run is carried out: in a process of its own, which may die without harm to others.

The job goes through standard input: a database URL may hold a password, which a command line
would show to everybody. The pipe stays open; when it ends, so does the child.
"""

import json
import signal
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

    def how(self) -> str:
        """Say how it ended, for people."""


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
        threading.Thread(target=self._wait, name="child", daemon=True).start()
        self._send(job)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """Kill it: SIGKILL, since nothing it could clean up outlives its transaction."""
        self._process.kill()

    def how(self) -> str:
        """Say how it ended."""
        code = self._process.poll()
        if code is None:
            return "it still lives"
        if code >= 0:
            return f"it exited with {code}"
        return f"killed by {_signal_name(-code)}"

    def _send(self, job: dict[str, Any]) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(job).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            # It is dead already, and `ended` says so.
            return

    def _wait(self) -> None:
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.ended.set()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
