"""The built wheel in an environment of its own: what a user installs is what was tested.

The new environment sees the libraries of this one (a path file) but not our sources: an editable
install's own path file is not read from there.
"""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, install it into a new virtual environment, return its bin folder."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "venv" / "bin"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An empty home and a database of its own."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "QUANTWATCH_DATABASE_URL": f"sqlite:///{tmp_path / 'wheel.db'}",
        "OMP_NUM_THREADS": "1",
    }


def quantwatch(
    installed: Path, env: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [str(installed / "quantwatch"), *arguments]
    return subprocess.run(
        command, env=env, cwd=env["HOME"], capture_output=True, text=True, check=False
    )


def test_it_is_the_wheel_that_runs(installed: Path, env: dict[str, str]) -> None:
    """Catches a test that silently uses the checkout."""
    code = "import quantwatch, quantwatch_kernels, quantwatch_dashboard as d; print(quantwatch.__file__)"
    done = subprocess.run(
        [str(installed / "python"), "-c", code],
        env=env,
        cwd=env["HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(installed.parent))


def test_the_schema_travels_with_the_wheel(installed: Path, env: dict[str, str]) -> None:
    """Catches migrations that only exist in the source tree."""
    assert quantwatch(installed, env, "db", "upgrade").returncode == 0
    done = quantwatch(installed, env, "db", "check")
    assert done.returncode == 0, done.stderr


def test_the_example_and_the_demo_travel_with_the_wheel(
    installed: Path, env: dict[str, str]
) -> None:
    """Catches data files left out of the package."""
    (folder,) = installed.parent.glob("lib/python*/site-packages/quantwatch")
    for name in (
        "config/example.toml",
        "config/demo.toml",
        "prompts/data/core-v1.jsonl",
        "py.typed",
    ):
        assert (folder / name).is_file(), name
    done = quantwatch(installed, env, "--config", str(folder / "config/demo.toml"), "check", "list")
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


@pytest.fixture
def dashboard(installed: Path, env: dict[str, str]) -> Iterator[int]:
    """The wheel's dashboard on a free port; ended by its own process id."""
    quantwatch(installed, env, "db", "upgrade")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(installed / "quantwatch"), "dashboard", "--port", str(port)]
    process = subprocess.Popen(command, env=env, cwd=env["HOME"], stdout=subprocess.DEVNULL)
    yield port
    process.terminate()
    process.wait(timeout=30)


def test_the_dashboard_starts_from_the_wheel(dashboard: int) -> None:
    """Catches app.py left out of the package."""
    for _ in range(120):
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{dashboard}/_stcore/health", timeout=5
            ) as answer:
                assert answer.read() == b"ok"
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail("the dashboard did not answer within a minute")


@pytest.mark.model
def test_the_demo_finds_its_planted_fault(installed: Path, env: dict[str, str]) -> None:
    """The demo as a newcomer runs it, from conversion to exit code."""
    done = quantwatch(installed, env, "demo", "--no-dashboard")
    assert done.returncode == 0, done.stderr
    shown = quantwatch(installed, env, "report", "latest", "--format", "json")
    document = json.loads(shown.stdout)
    verdicts = {c["name"]: c["verdict"] for c in document["candidates"]}
    assert verdicts == {
        "bf16": "pass",
        "int8": "pass",
        "int4-g64": "warn",
        "int8-fault": "regression",
    }
    outliers = {
        (a["candidate"], a["scope"])
        for a in document["alerts"]
        if a["rule"] == "isolated-error-outlier"
    }
    assert outliers == {("int8-fault", "layers.14")}
    culprits = {c["name"]: c["culprit"] for c in document["candidates"]}
    assert culprits["int8-fault"] == "layers.14.mlp.down_proj"
