"""Signals of a service: the first asks it to stop, as process 1 of a container, too."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that the first stop signal sets; more of them change nothing.

    A signal that the parent ignores (nohup) stays ignored. Outside the main thread, where Python
    handles no signals, the event is the caller's to set.
    """
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    found = {number: signal.getsignal(number) for number in _STOPPING}
    before = {n: handler for n, handler in found.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
