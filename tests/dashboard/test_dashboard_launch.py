"""How the dashboard is started, and what it may never load."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from quantwatch_dashboard import launch

MODULES = "import quantwatch_dashboard.views, quantwatch_dashboard.launch"


def test_app_path_is_the_script() -> None:
    """Catches a wheel or checkout without the script that Streamlit runs."""
    assert "st.navigation" in launch.app_path().read_text(encoding="utf-8")


def test_command_is_on_loopback_and_silent() -> None:
    """Catches a server that listens on every interface, phones home, or is driven without a browser."""
    words = launch.command(8501)

    assert words[:4] == [sys.executable, "-m", "quantwatch_dashboard.server", "run"]
    assert words[words.index("--server.address") + 1] == "127.0.0.1"
    assert words[words.index("--browser.gatherUsageStats") + 1] == "false"
    assert words[words.index("--server.port") + 1] == "8501"
    assert words[words.index("--server.enableAgentApi") + 1] == "false"
    assert int(words[words.index("--server.disconnectedSessionTTL") + 1]) <= 30


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_impossible_port_is_refused(port: int) -> None:
    """Catches a port that Streamlit would only complain about in a traceback."""
    with pytest.raises(ValueError, match=str(port)):
        launch.command(port)


def test_every_option_is_known_to_streamlit() -> None:
    """Catches an option that this Streamlit no longer has: the server would not start."""
    from streamlit import config

    names = {word.removeprefix("--") for word in launch.command(8501) if word.startswith("--")}
    assert names <= set(config.get_config_options())


def test_environment_names_database_and_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a server that watches another database, or whose heaps grow with every session."""
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", "sqlite:////elsewhere.db")
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.chdir(tmp_path)

    found = launch.environment("sqlite:////here.db", Path("quantwatch.toml"))

    assert found["QUANTWATCH_DATABASE_URL"] == "sqlite:////here.db"
    assert found["QUANTWATCH_CONFIG"] == str(tmp_path / "quantwatch.toml")
    assert found["MALLOC_ARENA_MAX"] == "2"


def test_environment_keeps_the_callers_number_of_heaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an operator's tuning that is overruled."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "16")
    monkeypatch.delenv("QUANTWATCH_CONFIG", raising=False)

    found = launch.environment("sqlite:////here.db")

    assert found["MALLOC_ARENA_MAX"] == "16"
    assert "QUANTWATCH_CONFIG" not in found


@pytest.mark.slow
def test_no_torch_and_quick() -> None:
    """Catches an import that makes the browser page wait for torch."""
    code = f"import sys; {MODULES}; bad = {{'torch', 'transformers', 'quantwatch_kernels'}} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    assert done.returncode == 0, done.stderr
    # Of the processor: on a busy machine the wall clock tells of the others.
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 10, "the pages take far too long to import"
