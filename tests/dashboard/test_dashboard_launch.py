"""How the dashboard is started, and what it may never load."""

import subprocess
import sys
import time

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


@pytest.mark.slow
def test_no_torch_and_quick() -> None:
    """Catches an import that makes the browser page wait for torch."""
    code = f"import sys; {MODULES}; bad = {{'torch', 'transformers', 'quantwatch_kernels'}} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 15, "the pages take far too long to import"
