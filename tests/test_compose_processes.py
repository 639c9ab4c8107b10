"""The commands of docker-compose.yml as processes, on a real PostgreSQL: from nothing to a run."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import create_engine, inspect, text

ROOT = Path(__file__).parents[1]
CANARY = "canary-4711-0815"
CONFIG = """
schema_version = 1
[checks.tiny]
suite = {{ files = ["prompts.txt"], window = 16, limit = 2 }}
reference = {{ model = "./model" }}
candidates = [{{ name = "int8", model = "./model", recipe = "int8-channel" }}]
threads = 1
isolated_fraction = 0.0
schedule = {{ cron = "0 2 * * *", zone = "Europe/Berlin" }}

[endpoints.ops]
url_env = "OPS_URL"

[service]
metrics_port = {port}
shutdown = "20s"
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answer(address: str) -> str | None:
    """Return the page, None while there is none or it is not 200."""
    try:
        with urllib.request.urlopen(address, timeout=5) as page:
            return str(page.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return None


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database of the session's server."""
    server = request.getfixturevalue("postgres_server")
    name = f"compose_{os.getpid()}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield server.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What lies beside docker-compose.yml: a configuration, a tiny random model, prompts."""
    place = ROOT / "tests" / "monitor" / "models" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_models", place)
    assert spec is not None
    assert spec.loader is not None
    builders: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builders)
    builders.tiny_llama(0).save_pretrained(tmp_path / "model")
    builders._tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("the quick brown fox jumps over the lazy dog. " * 8)
    (tmp_path / "quantwatch.toml").write_text(CONFIG.format(port=free_port()))
    return tmp_path


class Stack:
    """Starts commands of this program as docker-compose would, each with its own log."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("QUANTWATCH_")} | {
            "QUANTWATCH_DATABASE_URL": url,
            "QUANTWATCH_CONFIG": str(folder / "quantwatch.toml"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OPS_URL": f"https://127.0.0.1:9/services/{CANARY}",
            "OMP_NUM_THREADS": "1",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quantwatch.cli", *words]
        return subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, check=False
        )

    def start(self, name: str, words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "quantwatch.cli", *words]
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdout=log, stderr=log
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_for(self, name: str, address: str, limit_s: float = 90) -> str:
        deadline = time.monotonic() + limit_s
        while (found := answer(address)) is None:
            assert self.processes[name].poll() is None, self.log(name).read_text()
            assert time.monotonic() < deadline, self.log(name).read_text()
            time.sleep(0.2)
        return found

    def stop(self, name: str) -> int:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(60)

    def clear(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def stack(folder: Path, url: str) -> Iterator[Stack]:
    found = Stack(folder, url)
    yield found
    found.clear()


def dump(url: str) -> str:
    """Return every row of every table as text."""
    engine = create_engine(url)
    with engine.connect() as connection:
        names = inspect(connection).get_table_names()
        rows = [
            row for name in names for row in connection.execute(text(f'SELECT * FROM "{name}"'))
        ]
    engine.dispose()
    assert len(rows) > 50
    return str(rows)


def commands() -> dict[str, list[str]]:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return {name: service.get("command", []) for name, service in services.items()}


@pytest.mark.slow
@pytest.mark.postgres
def test_the_services_of_the_compose_file_work_together(stack: Stack, folder: Path) -> None:
    """Catches a stack that starts and measures nothing, leaks a secret, or can't be stopped."""
    words = commands()
    port = int((folder / "quantwatch.toml").read_text().split("metrics_port = ")[1].split()[0])
    assert stack.run(*words["migrate"]).returncode == 0
    stack.start("monitor", words["monitor"])
    page = str(free_port())
    dashboard = [
        "127.0.0.1" if w == "0.0.0.0" else page if w == "8501" else w for w in words["dashboard"]
    ]
    stack.start("dashboard", dashboard)
    ready = stack.wait_for("monitor", f"http://127.0.0.1:{port}/readyz")
    assert json.loads(ready)["scheduler"] == "ok"
    stack.wait_for("dashboard", f"http://127.0.0.1:{page}/_stcore/health")

    assert stack.run("check", "run", "tiny", "--queue", "--wait", "--json").returncode in (0, 1, 4)
    (run,) = json.loads(stack.run("runs", "list", "--json").stdout)
    assert run["status"] == "succeeded", run
    told = 'quantwatch_runs_total{check="tiny",status="succeeded"} 1.0'
    for _ in range(60):  # a scrape that the database didn't answer in time leaves figures out
        said = stack.wait_for("monitor", f"http://127.0.0.1:{port}/metrics")
        if told in said:
            break
        time.sleep(1)
    assert told in said

    tried = stack.run("endpoints", "test", "ops")
    assert tried.returncode == 3
    assert "refused" in tried.stderr
    assert stack.stop("monitor") == 0, stack.log("monitor").read_text()
    assert stack.stop("dashboard") in (0, -signal.SIGTERM), stack.log("dashboard").read_text()
    records = [json.loads(line) for line in stack.log("monitor").read_text().splitlines()]
    assert records[-1]["text"] == "ended"
    assert any(record.get("run") == run["run_id"] for record in records)
    logs = "".join(stack.log(name).read_text() for name in ("monitor", "dashboard"))
    assert CANARY not in said + logs + tried.stdout + tried.stderr + dump(stack.url)


@pytest.mark.slow
@pytest.mark.postgres
def test_each_part_runs_alone_and_two_schedulers_share_one_database(stack: Stack) -> None:
    """Catches parts that only work in one process, and a second scheduler that is in the way."""
    assert stack.run("db", "upgrade").returncode == 0
    config = stack.folder / "quantwatch.toml"
    for name, parts in {"a": ["scheduler", "metrics"], "b": ["scheduler", "metrics"]}.items():
        port = free_port()
        other = config.with_name(f"{name}.toml")
        other.write_text(CONFIG.format(port=port))
        stack.start(name, ["--config", str(other), "start", *parts])
        stack.wait_for(name, f"http://127.0.0.1:{port}/readyz")
    stack.start("worker", ["start", "worker"])
    stack.start("delivery", ["start", "delivery"])
    assert stack.run("check", "run", "tiny", "--queue", "--wait").returncode in (0, 1, 4)
    for name in ("a", "b", "worker", "delivery"):
        assert stack.stop(name) == 0, stack.log(name).read_text()


@pytest.mark.slow
@pytest.mark.postgres
def test_a_schema_that_is_not_ours_is_refused_with_the_fix(stack: Stack) -> None:
    """Catches a service that starts on yesterday's tables and fails at two in the night."""
    done = stack.run("start")
    assert done.returncode == 3
    assert "run `quantwatch db upgrade`" in done.stderr
