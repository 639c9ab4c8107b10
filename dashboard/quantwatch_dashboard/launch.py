"""How the command line starts the dashboard: the script's place and Streamlit's options."""

import sys
from pathlib import Path

ADDRESS = "127.0.0.1"
_PACKAGE = Path(__file__).parent
_OPTIONS = {
    "server.headless": "true",
    "browser.gatherUsageStats": "false",
    "server.fileWatcherType": "none",
    "server.runOnSave": "false",
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
        f"app.py is neither in {_PACKAGE} nor beside it: reinstall quantwatch, its wheel is incomplete"
    )


def command(port: int, address: str = ADDRESS) -> list[str]:
    """Return the command that serves the dashboard. The database is named by QUANTWATCH_DATABASE_URL."""
    if not 0 < port < 65536:
        raise ValueError(f"port must be between 1 and 65535, got {port}")
    options = {"server.port": str(port), "server.address": address, **_OPTIONS}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    return [sys.executable, "-m", "streamlit", "run", str(app_path()), *words]
