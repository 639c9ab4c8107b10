"""`quantwatch start` as a process on SQLite: stopped in the middle of a run, edited, refused."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantwatch.store.components import list_components
from quantwatch.store.queue import NewRun, enqueue
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import CheckRow, RunAttemptRow, RunRow

pytestmark = pytest.mark.slow
CONFIG = """
schema_version = 1
[checks.tiny]
suite = { files = ["prompts.txt"], window = 16 }
reference = { model = "./model" }
candidates = [{ name = "int8", model = "./model", recipe = "int8-channel" }]
threads = 1
[service]
metrics_port = 0
shutdown = "0s"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and a model that never gets as far as being loaded."""
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.txt").write_text("the quick brown fox. " * 40)
    (tmp_path / "quantwatch.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def sqlite_db(migrated_file: Path, folder: Path) -> Iterator[Database]:
    database = open_database(f"sqlite:///{shutil.copy(migrated_file, folder / 'q.db')}")
    yield database
    database.close()


class Service:
    """A started process and its log."""

    def __init__(self, folder: Path, *words: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("QUANTWATCH_")}
        env |= {"QUANTWATCH_DATABASE_URL": f"sqlite:///{folder}/q.db", "OMP_NUM_THREADS": "1"}
        env |= {"XDG_CACHE_HOME": str(folder / "cache")}
        self._log = folder / "log.txt"
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "quantwatch.cli", "start", *words]
            self.process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def texts(self) -> list[str]:
        return [json.loads(line)["text"] for line in self.log.splitlines() if line[:1] == "{"]

    def wait(self, until: Callable[[], Any], limit_s: float = 60) -> None:
        deadline = time.monotonic() + limit_s
        while not until():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def begin(*words: str) -> Service:
        started.append(Service(folder, *words))
        return started[-1]

    yield begin
    for service in started:
        service.process.kill()
        service.process.wait()


def test_a_run_that_takes_too_long_is_given_back(
    sqlite_db: Database, start: Callable[..., Service], folder: Path
) -> None:
    """Catches a deploy that costs a run one of its attempts, or leaves it active for two minutes."""
    with sqlite_db.writer() as session:
        run_id = enqueue(session, NewRun("tiny", "m:1", {}, str(folder)))
    service = start()
    service.wait(lambda: "run claimed" in service.log)
    assert service.stop() == 0, service.log
    assert service.texts[-1] == "ended"
    with sqlite_db.reader() as session:
        run = session.get(RunRow, run_id)
        assert run is not None
        attempts = session.query(RunAttemptRow).all()
        assert [attempt.outcome for attempt in attempts] == ["released"]
        assert (run.status, run.attempt, run.lease_token) == ("queued", 0, None)
        assert list_components(session) == []


def test_a_file_that_is_edited_is_applied_and_a_broken_one_is_not(
    sqlite_db: Database, start: Callable[..., Service], folder: Path
) -> None:
    """Catches a service that has to be restarted for each change, or dies of a typing error."""
    file = folder / "quantwatch.toml"
    service = start("scheduler")
    service.wait(lambda: "part started" in service.log)
    file.write_text(CONFIG.replace("checks.tiny", "checks.other"))
    service.wait(lambda: "removed check" in service.log)
    file.write_text("schema_version = ")
    service.wait(lambda: "can't be used; the one before stays" in service.log)
    assert service.stop(signal.SIGINT) == 0
    with sqlite_db.reader() as session:
        rows = {row.name: row.removed_at is None for row in session.query(CheckRow)}
    assert rows == {"tiny": False, "other": True}


def test_a_second_scheduler_on_the_file_is_refused_unless_it_stands_by(
    sqlite_db: Database, start: Callable[..., Service]
) -> None:
    """Catches two services on one file, of which nobody knows which one schedules."""
    first = start("scheduler")
    first.wait(lambda: "part started" in first.log)
    second = start("scheduler")
    assert second.process.wait(60) == 3
    assert f"process {first.process.pid}" in second.log
    third = start("scheduler", "--standby")
    third.wait(lambda: third.log.count("part started") >= 3)
    assert third.stop() == first.stop() == 0


def test_a_port_in_use_ends_it_at_once(
    sqlite_db: Database, start: Callable[..., Service], folder: Path
) -> None:
    """Catches a service without health checks."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = CONFIG.replace("metrics_port = 0", f"metrics_port = {port}")
        (folder / "quantwatch.toml").write_text(text)
        service = start()
        assert service.process.wait(60) == 2
    assert f"127.0.0.1:{port} can't be listened on" in service.log


def test_without_a_configuration_there_is_no_service(
    start: Callable[..., Service], folder: Path
) -> None:
    """Catches a service that watches nothing."""
    (folder / "quantwatch.toml").unlink()
    service = start()
    assert service.process.wait(60) == 2
    assert "the service needs a quantwatch.toml" in service.log


def test_the_module_of_a_run_exists() -> None:
    """Catches a renamed module that only a child process would miss (B07)."""
    assert importlib.util.find_spec("quantwatch.worker.child") is not None
