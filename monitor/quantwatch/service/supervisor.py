"""The parts of one process: all start, all live or the process ends, all stop in order."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol, runtime_checkable

from quantwatch.errors import MonitorError, StoreError
from quantwatch.observability import logs, meters

LOOK_EVERY_S = 1.0
_MARGIN_S = 10.0
"""How long after `shutdown` a part may take to end what it is doing."""

log = logs.get(__name__)


class Part(Protocol):
    """A part of the service, working in threads of its own between `start` and `stop`."""

    @property
    def name(self) -> str:
        """scheduler, worker, delivery, metrics or housekeeping."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What it died of; None while it works and after a clean stop."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether its threads work."""
        ...

    def start(self) -> None:
        """Begin to work."""
        ...

    def stop(self, wait_s: float) -> None:
        """Take nothing new, end within about `wait_s` seconds."""
        ...


@runtime_checkable
class TakesWork(Protocol):
    """A part that begins work of its own accord: a scheduler, a worker."""

    def ask_to_stop(self) -> None:
        """Take nothing new from now on. Returns at once."""
        ...


@dataclass
class Thread:
    """A part of one thread: `work(stopping)` returns soon after the event is set."""

    name: str
    work: Callable[[threading.Event], None]
    failure: BaseException | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the thread works."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to work."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def stop(self, wait_s: float) -> None:
        """Ask it to end and wait."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            self.work(self._stopping)
        # Whatever it is, the supervisor ends the process with it.
        except BaseException as error:  # noqa: BLE001
            self.failure = error


def supervise(
    parts: Sequence[Part],
    stopping: threading.Event,
    shutdown_s: float,
    look_s: float = LOOK_EVERY_S,
) -> None:
    """Run the parts until `stopping` is set, then stop them in the given order.

    Raises MonitorError when a part dies or does not end: never is a half-dead service left behind.
    """
    dead: Part | None = None
    with _started(parts, shutdown_s):
        while dead is None and not stopping.wait(look_s):
            dead = _dead(parts)
            _show(parts)
        if dead is None:
            log.info("stopping", wait_s=shutdown_s)
    if dead is not None:
        raise MonitorError(f"part {dead.name} died: {_words(dead.failure)}") from dead.failure
    if stuck := [part.name for part in parts if part.is_alive]:
        raise MonitorError(f"part {', '.join(stuck)} did not end in time; it is left behind")


@contextmanager
def _started(parts: Sequence[Part], shutdown_s: float) -> Iterator[None]:
    """Start the parts; stop those that were started, whatever happens."""
    begun: list[Part] = []
    try:
        for part in parts:
            part.start()
            begun.append(part)
            log.info("part started", part=part.name)
        _show(parts)
        yield
    finally:
        deadline = time.monotonic() + shutdown_s + _MARGIN_S
        # All at once: a worker claims nothing, and its run has its whole time, while the
        # scheduler before it ends.
        for part in begun:
            if isinstance(part, TakesWork):
                part.ask_to_stop()
        for _, alike in groupby(begun, key=lambda part: part.name):
            _stop_together(list(alike), max(0.0, deadline - time.monotonic()))


def _stop_together(parts: Sequence[Part], wait_s: float) -> None:
    """Stop several workers at once: each may take the whole time for its run."""
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(partial(_stop, wait_s=wait_s), parts))


def _stop(part: Part, wait_s: float) -> None:
    """Stop a part. One that can't sign off, the database being away, keeps no other from ending."""
    try:
        part.stop(wait_s)
    except StoreError as error:
        log.warning("part could not sign off", part=part.name, why=str(error))
    log.info("part did not stop" if part.is_alive else "part stopped", part=part.name)


def _dead(parts: Sequence[Part]) -> Part | None:
    """Return a part that ended without being asked to."""
    return next((part for part in parts if part.failure is not None or not part.is_alive), None)


def _show(parts: Sequence[Part]) -> None:
    for part in parts:
        meters.PART_ALIVE.labels(part=part.name).set(part.is_alive and part.failure is None)


def _words(error: BaseException | None) -> str:
    return "its thread ended" if error is None else f"{type(error).__name__}: {error}"
