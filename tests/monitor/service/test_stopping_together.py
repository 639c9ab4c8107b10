"""A stop reaches every part that takes work at once, and a server that vanished is noticed."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from quantwatch.scheduler import Scheduler
from quantwatch.service import running
from quantwatch.service.running import Wishes
from quantwatch.service.supervisor import TakesWork, supervise
from quantwatch.store.session import Database
from quantwatch.worker import Worker


@pytest.fixture
def asked(part: Any) -> Any:
    @dataclass
    class Asked(part):  # type: ignore[misc]
        """A part that can be asked to stop."""

        def ask_to_stop(self) -> None:
            self.journal.append(f"ask {self.name}")

    return Asked


def test_all_are_asked_before_one_is_waited_for(part: Any, asked: Any) -> None:
    """Catches a worker that claims a run after SIGTERM, while the scheduler ends."""
    stopped = threading.Event()
    journal: list[str] = []
    stopped.set()
    parts = [asked("scheduler", journal), asked("worker", journal), part("delivery", journal)]
    supervise(parts, stopped, 1)
    assert journal[3:] == [
        *("ask scheduler", "ask worker"),
        *("stop scheduler", "stop worker", "stop delivery"),
    ]


def test_what_takes_work_can_be_asked() -> None:
    """Catches a part that lost the method that the supervisor looks for."""
    assert issubclass(Scheduler, TakesWork)
    assert issubclass(Worker, TakesWork)


def test_each_worker_may_use_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run on two GPUs that no worker of the service can ever take."""
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        running, "_worker", lambda _db, _current, wishes: seen.append(wishes.devices)
    )
    monkeypatch.setattr(running, "House", lambda *_, **__: None)
    monkeypatch.setattr(running, "Scheduler", lambda _db: None)
    nothing: Any = None
    running.assemble(nothing, nothing, Wishes(("worker",), devices=("cuda:0", "cuda:1")))
    assert seen == [("cuda:0", "cuda:1")] * 2


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_server_that_vanished_is_noticed(db: Database) -> None:
    """Catches a thread that waits for hours for a host that was switched off."""
    with db.reader() as session:
        connection: Any = session.connection().connection.driver_connection
        known = connection.info.get_parameters()
    expected = {
        "keepalives_idle": "10",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "30000",
    }
    assert known.items() >= expected.items()
