"""Parts that do as they are told."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from quantwatch.observability import labels


@pytest.fixture(autouse=True)
def _labels_as_before() -> Iterator[None]:
    yield
    labels.forget()


@dataclass
class FakePart:
    """A part that works until it is stopped, or dies when told to."""

    name: str
    journal: list[str] = field(default_factory=list)
    failure: BaseException | None = None
    is_alive: bool = False
    refuses: bool = False
    stuck: bool = False
    started: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        if self.refuses:
            raise OSError("no")
        self.is_alive = True
        self.journal.append(f"start {self.name}")
        self.started.set()

    def stop(self, wait_s: float) -> None:
        self.journal.append(f"stop {self.name}")
        self.is_alive = self.stuck


@pytest.fixture
def part() -> type[FakePart]:
    return FakePart
