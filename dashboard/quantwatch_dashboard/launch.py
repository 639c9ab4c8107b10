"""How the command line starts the dashboard: the script's place and Streamlit's options."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ADDRESS = "127.0.0.1"
_PACKAGE = Path(__file__).parent
_OPTIONS = {
    "server.headless": "true",
    "browser.gatherUsageStats": "false",
    "server.fileWatcherType": "none",
    "server.runOnSave": "false",
    "server.enableAgentApi": "false",
    # A closed page keeps its state for a browser that comes back. Addresses restore what is shown,
    # so half a minute will do instead of Streamlit's two.
    "server.disconnectedSessionTTL": "30",
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "none",
    "theme.baseRadius": "8px",
    "theme.light.primaryColor": "#1D5FC2",
    "theme.light.backgroundColor": "#FBFCFD",
    "theme.light.secondaryBackgroundColor": "#F1F3F7",
    "theme.light.textColor": "#1A1F2B",
    "theme.dark.primaryColor": "#7FB4FF",
    "theme.dark.backgroundColor": "#10131A",
    "theme.dark.secondaryBackgroundColor": "#1D222D",
    "theme.dark.textColor": "#E8EBF1",
}


def app_path() -> Path:
    """Return the script that Streamlit runs: inside the wheel, or beside the package in a checkout.

    Raises FileNotFoundError when the installation has neither.
    """
    for path in (_PACKAGE / "app.py", _PACKAGE.parent / "app.py"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"app.py is neither in {_PACKAGE} nor beside it: the installation is incomplete"
    )


def command(port: int, address: str = ADDRESS) -> list[str]:
    """Return the command that serves the database named by QUANTWATCH_DATABASE_URL.

    Roles and checks are read from the file named by QUANTWATCH_CONFIG, if there is one:
    `environment` names both.

    Raises ValueError on a port that does not exist.
    """
    if not 0 < port < 65536:
        raise ValueError(f"port must be between 1 and 65535, got {port}")
    options = {"server.port": str(port), "server.address": address, **_OPTIONS}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    return [sys.executable, "-m", "quantwatch_dashboard.server", "run", str(app_path()), *words]


def environment(database_url: str, config: Path | None = None) -> dict[str, str]:
    """Return the environment of `command`: the caller's, a database and perhaps a settings file.

    Streamlit runs each page in a new thread, and glibc gives threads heaps of their own, as many as
    eight per core, whose free parts no other thread uses: memory grew by 0.26 MB a session. Two
    heaps are enough for pages that hold the interpreter's lock. A caller's own number is kept.
    """
    named = {} if config is None else {"QUANTWATCH_CONFIG": str(config.absolute())}
    return {
        "MALLOC_ARENA_MAX": "2",
        **os.environ,
        "QUANTWATCH_DATABASE_URL": database_url,
        **named,
    }


@contextmanager
def serving(
    database_url: str,
    timeout_s: float = 60.0,
    *,
    port: int | None = None,
    address: str = ADDRESS,
    folder: Path | None = None,
) -> Iterator[str]:
    """Serve a database on a port of the loopback and give the address; stops at the end.

    The port is a free one when absent. `address` is what it listens on; `folder` is where it runs:
    Streamlit looks there for `.streamlit/secrets.toml`. Raises TimeoutError when the server does
    not answer in time.
    """
    port = free_port() if port is None else port
    words = command(port, address)
    server = subprocess.Popen(
        words, env=environment(database_url), cwd=folder, stdout=subprocess.DEVNULL
    )
    try:
        _wait(f"http://{ADDRESS}:{port}/_stcore/health", server, timeout_s)
        yield f"http://{ADDRESS}:{port}"
    finally:
        server.terminate()
        server.wait(timeout=20)


def free_port() -> int:
    """Return a port of the loopback on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(health: str, server: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urlopen(health, timeout=2):
                return
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise TimeoutError(f"the dashboard did not answer at {health} within {timeout_s:g} s")
