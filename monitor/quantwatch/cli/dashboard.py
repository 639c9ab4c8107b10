"""`quantwatch dashboard`: start the browser pages."""

import importlib
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

from quantwatch.cli import options as o
from quantwatch.cli.session import Session
from quantwatch.cli.streams import whisper
from quantwatch.errors import MonitorError, UserError

LOOPBACK = "127.0.0.1"


def dashboard(context: typer.Context, port: o.Port = 8501, address: o.Address = LOOPBACK) -> None:
    """Show runs and heatmaps in a browser until Ctrl-C."""
    session = Session.of(context)
    with session.writer() as database:
        url = database.url
    serve(url, port, address, session.find_config())


def serve(url: str, port: int, address: str = LOOPBACK, config: Path | None = None) -> NoReturn:
    """Become the dashboard: signals reach it, and nothing of a run stays in memory.

    It reads from the configuration who may do what, and what a check measures.
    """
    check_port(port, address)
    launch = launcher()
    command = launch.command(port, address)
    shown = "localhost" if address == LOOPBACK else address
    whisper(f"dashboard: http://{shown}:{port} (Ctrl-C ends it)")
    sys.stdout.flush()
    os.execve(command[0], command, launch.environment(url, config))


def launcher() -> Any:
    """Return the dashboard's own launch module, by name: this layer must not import that one."""
    try:
        return importlib.import_module("quantwatch_dashboard.launch")
    except ImportError as error:
        raise MonitorError(f"the dashboard is not installed: {error}") from error


def check_port(port: int, address: str) -> None:
    """Raise UserError when the port is taken: Streamlit would say so only after a while."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            reason = f"can't listen on {address}:{port}: {error.strerror}"
            raise UserError(f"{reason}; choose another with --port") from error
