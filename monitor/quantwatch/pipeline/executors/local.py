"""`executor = "local"`: processes on this machine, started anew (a fork of torch's threads hangs).

What a worker measures comes through a pipe of its own, read by a thread of its own, so that none
waits for another. Half a message of a process that was killed is no message.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading

from quantwatch.pipeline.executors import frames
from quantwatch.pipeline.executors.job import Event, Failed, Job, Lost

COMMAND = (sys.executable, "-P", "-m", "quantwatch.pipeline.executors.child")
"""Without the current folder on the import path: what lies there is not ours."""


class LocalCrew:
    """Processes of this program."""

    def __init__(self, job: Job, size: int) -> None:
        self._job = job
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.workers: list[_Worker] = []
        try:
            for _ in range(size):
                self.hire()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Number of workers, dead ones included."""
        return len(self.workers)

    def hire(self) -> int:
        """Start one more worker; return its number. Raises OSError where there is no room."""
        self.workers.append(_Worker(self.size, self._job, self._events))
        return self.size - 1

    def give(self, worker: int, unit: int) -> None:
        """Have a worker measure a unit."""
        self.workers[worker].send(unit)

    def wait(self, timeout_s: float) -> Event | None:
        """Return what happened next, None if nothing did in time."""
        with contextlib.suppress(queue.Empty):
            return self._events.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """Kill all processes: nothing they could clean up is anybody's."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.close()


class _Worker:
    """One process, and the thread that reads what it sends."""

    def __init__(self, number: int, job: Job, events: "queue.SimpleQueue[Event]") -> None:
        self._number, self._events = number, events
        self._results, theirs = os.pipe()
        try:
            # A session of its own: Ctrl-C reaches this process, which ends the others.
            self.process = subprocess.Popen(
                (*COMMAND, str(number), str(theirs)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._results)
            raise
        finally:
            os.close(theirs)
        self._attending = threading.Thread(
            target=self._attend, args=(job,), name=f"worker {number}", daemon=True
        )
        try:
            self._attending.start()
        except RuntimeError as error:  # no more threads here: the process is nobody's
            self.process.kill()
            self.process.wait()
            os.close(self._results)
            raise OSError(f"worker {number}: {error}") from error

    def send(self, value: object) -> None:
        """Send a value; to a process that is dead, nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            frames.send(self.process.stdin, value)

    def close(self) -> None:
        """Wait for the end of a process that was killed."""
        self._attending.join()
        assert self.process.stdin is not None
        # What it left unread is tried once more, and the pipe is closed all the same.
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _attend(self, job: Job) -> None:
        self.send(job)
        with os.fdopen(self._results, "rb") as results, contextlib.suppress(EOFError, OSError):
            try:
                while True:
                    self._events.put(frames.receive(results))
            except (ValueError, MemoryError) as error:
                self._events.put(Failed(self._number, None, error))
        words = f"worker {self._number} (process {self.process.pid}) {_words(self.process.wait())}"
        self._events.put(Lost(self._number, words))


def _words(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
