"""Ctrl-C, a CI job's SIGTERM, a closed terminal: each stops a run once, and cleanly."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_STOPPING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise KeyboardInterrupt in the body at the first stop signal and ignore a second Ctrl-C.

    A second one would tear what the first is cleaning up: the run would stay "running" for ever.
    A signal that the parent ignores (nohup) stays ignored; SIGKILL is there for the impatient.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in _STOPPING}
    before = {n: h for n, h in found.items() if h not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        # Once stopped, the process is on its way out: nothing may tear that, either.
        if any(signal.getsignal(number) is not signal.SIG_IGN for number in before):
            for number, handler in before.items():
                signal.signal(number, handler)


def _stop(*_: Any) -> NoReturn:
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    # What it tears in the making would complain when it is thrown away.
    sys.unraisablehook = lambda _: None
    raise KeyboardInterrupt
