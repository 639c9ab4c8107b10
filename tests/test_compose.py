"""docker-compose.yml, as far as that goes without an engine."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantwatch.config import durations
from quantwatch.config.service import ServiceConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="Debian's docker-compose is not installed"
)
@pytest.mark.parametrize(("password", "code"), [("secret", 0), (None, 1)], ids=["set", "unset"])
def test_the_file_is_valid_and_demands_a_password(password: str | None, code: int) -> None:
    """Catches a typo in the file, and a database that starts with an empty password."""
    env = {k: v for k, v in os.environ.items() if k != "POSTGRES_PASSWORD"}
    env |= {} if password is None else {"POSTGRES_PASSWORD": password}
    command = ["docker-compose", "-f", str(ROOT / "docker-compose.yml"), "config", "-q"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == (code != 0), done.stderr


def test_no_secret_is_written_down(compose: Any) -> None:
    """Catches a password that is committed."""
    text = (ROOT / "docker-compose.yml").read_text()
    assert text.count("POSTGRES_PASSWORD:?") == 2
    assert compose["services"]["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith("${")


def test_the_dashboard_is_reachable_from_this_host_only(compose: Any) -> None:
    """Catches a port published to the network: on loopback the user is operator."""
    ports = [p for s in compose["services"].values() for p in s.get("ports", [])]
    assert ports == ["127.0.0.1:8501:8501"]


def test_the_image_runs_as_a_user() -> None:
    """Catches a container that runs as root."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "USER quantwatch" in lines
    assert lines.index("USER quantwatch") < next(
        i for i, x in enumerate(lines) if x.startswith("ENTRYPOINT")
    )


def test_the_image_can_compile_what_measures() -> None:
    """Catches a container in which the lens takes three times as long, every night."""
    last = (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1]
    assert "--no-install-recommends g++" in last
    assert last.index("g++") < last.index("USER quantwatch")


def test_every_service_is_looked_after(compose: Any) -> None:
    """Catches a container that hangs and stays, and a monitor that only lists its checks."""
    services = compose["services"]
    for name in ("postgres", "monitor", "dashboard"):
        assert services[name]["healthcheck"]["test"]
    assert services["monitor"]["command"] == ["start"]
    assert "/healthz" in services["monitor"]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", ["migrate", "monitor", "dashboard"])
def test_our_containers_can_change_nothing_but_their_data(name: str, compose: Any) -> None:
    """Catches a writable root, rights that nobody needs, a secret that can be overwritten."""
    service = compose["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    writable = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    assert writable == ["cache:/var/lib/quantwatch"]


def test_a_stopped_monitor_has_time_to_give_its_run_back(compose: Any) -> None:
    """Catches docker's ten seconds, after which a run would be killed in the middle."""
    grace = durations.seconds(compose["services"]["monitor"]["stop_grace_period"])
    assert grace >= durations.seconds(ServiceConfig().shutdown) + 20


def test_services_wait_for_the_schema(compose: Any) -> None:
    """Catches a dashboard that starts on an empty database."""
    for name in ("monitor", "dashboard"):
        waits = compose["services"][name]["depends_on"]["migrate"]["condition"]
        assert waits == "service_completed_successfully"
