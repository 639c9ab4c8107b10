"""A worker of `executor = "local"`: `python -m quantwatch.pipeline.executors.child`.

Its job and its units come through standard input, what it measures leaves through the pipe whose
number it is given. It ends with the process that started it, however that one ends: the pipe does.
"""

import os
import queue
import signal
import sys
import threading
from typing import IO, Any

from quantwatch.pipeline.executors import frames
from quantwatch.pipeline.executors.job import Done, Failed, Job, Opened, opened, place, portable
from quantwatch.pipeline.reasons import peak_memory_bytes

ORPHANED = 75
"""Exit code when whoever started it is gone."""
_TOLD_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Open the job, then measure unit after unit until the pipe ends."""
    for number in _TOLD_TO_STOP:  # theirs to heed who started it
        signal.signal(number, signal.SIG_IGN)
    worker = int(sys.argv[1])
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(inbox,), name="inbox", daemon=True).start()
    with os.fdopen(int(sys.argv[2]), "wb") as outbox:
        _work(worker, inbox.get(), inbox, outbox)


def _work(worker: int, job: Job, inbox: "queue.SimpleQueue[Any]", outbox: IO[bytes]) -> None:
    unit: int | None = None
    try:
        with opened(job) as (shard, facts):
            frames.send(outbox, Opened(worker, facts, place()))
            while True:
                unit = inbox.get()
                partial = shard.measure(unit)
                frames.send(outbox, Done(worker, partial, peak_memory_bytes()))
    # Whatever it is: the run ends with it as if it had been raised there.
    except Exception as error:  # noqa: BLE001
        frames.send(outbox, Failed(worker, unit, portable(error)))


def _listen(inbox: "queue.SimpleQueue[Any]") -> None:
    """Take what comes, and end at once when nobody is there any more to send it."""
    try:
        while True:
            inbox.put(frames.receive(sys.stdin.buffer))
    except (EOFError, OSError):
        os._exit(ORPHANED)
    except (ValueError, MemoryError) as error:  # nothing that can be worked on
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
