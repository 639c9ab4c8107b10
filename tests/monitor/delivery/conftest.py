"""Receivers on the loopback."""

import socket
from collections.abc import Callable, Iterator

import pytest
from tests.monitor.delivery.loopback import Receiver

from quantwatch.observability import redaction


@pytest.fixture(autouse=True)
def _no_secrets_left() -> Iterator[None]:
    yield
    redaction.forget()


@pytest.fixture
def receivers() -> Iterator[Callable[[], Receiver]]:
    started: list[Receiver] = []

    def start() -> Receiver:
        started.append(Receiver())
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def receiver(receivers: Callable[[], Receiver]) -> Receiver:
    return receivers()


@pytest.fixture
def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
