"""`quantwatch dashboard`: start the browser pages."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import typer

from quantwatch.cli import options as o
from quantwatch.cli.session import Session, whisper
from quantwatch.errors import MonitorError, UserError


def dashboard(
    context: typer.Context, port: o.Port = 8501, address: o.Address = "localhost"
) -> None:
    """Show runs and heatmaps in a browser until Ctrl-C."""
    with Session.of(context).writer() as database:
        url = database.url
    raise typer.Exit(serve(url, port, address))


def serve(url: str, port: int, address: str = "localhost") -> int:
    """Run the dashboard until it ends; return its exit code, 0 after Ctrl-C."""
    command = [
        *(sys.executable, "-m", "streamlit", "run", str(app_path())),
        *("--server.port", str(port), "--server.address", address, "--server.headless", "true"),
        *("--browser.gatherUsageStats", "false"),
    ]
    check_port(port, address)
    whisper(f"dashboard: http://{address}:{port} (Ctrl-C ends it)")
    environment = os.environ | {"QUANTWATCH_DATABASE_URL": url}
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except KeyboardInterrupt:
        return 0


def app_path() -> Path:
    """Return the Streamlit script: inside the package when installed, beside it in a checkout."""
    found = importlib.util.find_spec("quantwatch_dashboard")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    places = [Path(f) / "app.py" for f in folders] + [Path(f).parent / "app.py" for f in folders]
    for place in places:
        if place.is_file():
            return place
    raise MonitorError("the dashboard's app.py is not installed: install quantwatch again")


def check_port(port: int, address: str) -> None:
    """Raise UserError when the port is taken: Streamlit would say so only after a while."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            reason = f"can't listen on {address}:{port}: {error.strerror}"
            raise UserError(f"{reason}; choose another with --port") from error
