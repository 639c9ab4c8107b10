"""A migrated database per test, and receivers on the loopback."""

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.monitor.delivery.loopback import Receiver

from quantwatch.observability import redaction
from quantwatch.store.session import Database, open_database
from quantwatch.store.upgrade import upgrade


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    upgrade(database_url)
    database = open_database(database_url, wait_s=5)
    yield database
    database.close()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite database, migrated once."""
    path = tmp_path_factory.mktemp("delivery") / "empty.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_db(migrated_file: Path, tmp_path: Path) -> Iterator[Database]:
    """For what doesn't depend on the database."""
    shutil.copy(migrated_file, tmp_path / "one.db")
    database = open_database(f"sqlite:///{tmp_path / 'one.db'}", wait_s=5)
    yield database
    database.close()


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
