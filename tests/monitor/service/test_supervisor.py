"""All parts live, or the process ends: never a half-dead service."""

import threading
import time
from typing import Any

import pytest

from quantwatch.errors import MonitorError, StoreError
from quantwatch.observability import meters
from quantwatch.service.chores import Chore, keep_house
from quantwatch.service.supervisor import Thread, supervise

STOPPED = threading.Event()
STOPPED.set()


def test_parts_stop_in_the_order_in_which_they_start(part: Any) -> None:
    """Catches a worker that claims a run while its delivery is gone already."""
    journal: list[str] = []
    supervise([part("scheduler", journal), part("worker", journal)], STOPPED, 1)
    assert journal == ["start scheduler", "start worker", "stop scheduler", "stop worker"]


@pytest.mark.parametrize("error", [ValueError("boom"), None], ids=["error", "thread-ended"])
def test_a_part_that_dies_ends_the_process(part: Any, error: BaseException | None) -> None:
    """Catches a service that looks alive and measures nothing."""
    journal: list[str] = []
    dying, other = part("worker", journal), part("delivery", journal)

    def die() -> None:
        assert other.started.wait(5)
        dying.failure, dying.is_alive = error, False

    threading.Thread(target=die).start()
    with pytest.raises(
        MonitorError, match=r"part worker died: (ValueError: boom|its thread ended)"
    ):
        supervise([dying, other], threading.Event(), 1, look_s=0.01)
    assert journal[-2:] == ["stop worker", "stop delivery"]
    alive = meters.PART_ALIVE.labels(part="worker")._value.get()
    assert alive == 0


def test_a_part_that_does_not_start_stops_those_before_it(part: Any) -> None:
    """Catches threads that go on behind an error at the start."""
    journal: list[str] = []
    with pytest.raises(OSError, match="no"):
        supervise([part("worker", journal), part("metrics", journal, refuses=True)], STOPPED, 1)
    assert journal == ["start worker", "stop worker"]


def test_a_part_that_does_not_end_is_said(part: Any) -> None:
    """Catches exit code 0 although a run was torn."""
    with pytest.raises(MonitorError, match="part worker did not end in time"):
        supervise([part("worker", stuck=True)], STOPPED, 0)


def test_a_thread_keeps_what_it_died_of() -> None:
    """Catches a traceback that only stderr has seen."""

    def work(_: threading.Event) -> None:
        raise KeyError("lost")

    thread = Thread("housekeeping", work)
    thread.start()
    with pytest.raises(MonitorError, match="part housekeeping died: KeyError: 'lost'"):
        supervise([thread], threading.Event(), 1, look_s=0.01)


# chores


def test_chores_come_back_at_their_own_pace() -> None:
    """Catches a slow chore that starves the others, and one that is done once."""
    done: list[str] = []
    stopping = threading.Event()

    def quick() -> None:
        done.append("quick")
        if done.count("quick") == 4:
            stopping.set()

    chores = [Chore("quick", 0.001, quick), Chore("slow", 60, lambda: done.append("slow"))]
    keep_house(chores, stopping)
    assert done.count("slow") == 1
    assert done.count("quick") == 4


def test_a_database_that_is_away_puts_a_chore_off() -> None:
    """Catches a service that ends because PostgreSQL was restarted."""
    stopping, tries = threading.Event(), []

    def chore() -> None:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise StoreError("away")
        stopping.set()

    keep_house([Chore("alerts", 0.001, chore)], stopping)
    assert len(tries) == 3


def test_a_mistake_of_ours_ends_the_part() -> None:
    """Catches an exception that is swallowed every minute for months."""

    def chore() -> None:
        raise TypeError("ours")

    with pytest.raises(TypeError, match="ours"):
        keep_house([Chore("alerts", 1, chore)], threading.Event())
