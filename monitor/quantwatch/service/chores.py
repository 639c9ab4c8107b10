"""Small work that comes back: each chore at its pace, one after the other, in one thread."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantwatch.errors import StoreError
from quantwatch.observability import logs

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Chore:
    """What is done every `every_s` seconds, the first time at once."""

    name: str
    every_s: float
    do: Callable[[], None]


def keep_house(
    chores: Sequence[Chore],
    stopping: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Do the chores until told to stop.

    A database that can't be used now is waited for; any other error is a mistake of ours and
    leaves here.
    """
    due = dict.fromkeys((chore.name for chore in chores), clock())
    while True:
        for chore in chores:
            if stopping.is_set():
                return
            if clock() >= due[chore.name]:
                _do(chore)
                # Counted from its end: a slow one never fills the thread.
                due[chore.name] = clock() + chore.every_s
        if stopping.wait(max(0.0, min(due.values()) - clock())):
            return


def _do(chore: Chore) -> None:
    try:
        chore.do()
    except StoreError as error:
        log.warning("chore put off", chore=chore.name, why=str(error))
