"""The real server: how long it takes to start, and what it has loaded once a page is drawn."""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from quantwatch_dashboard.launch import serving

MAX_CPU_S = 3.0
"""The promise, in processor time: a busy machine takes longer, but does no more."""
WAIT_S = 180
HEAVY = ("libtorch", "/torch/", "/tokenizers/", "/safetensors/")


@pytest.fixture
def server(demo_url: str) -> Iterator[tuple[str, psutil.Process]]:
    """The dashboard on a filled database: its address and its process."""
    with serving(demo_url, WAIT_S) as address:
        port = address.rsplit(":", 1)[1]
        found = [p for p in psutil.Process().children(recursive=True) if port in p.cmdline()]
        yield address, found[0]


def draw(address: str) -> list[str]:
    """Open a session as a browser does, wait until its page is drawn, return the page's markup."""
    uri, shown = f"{address.replace('http', 'ws')}/_stcore/stream", list[str]()
    spoken = [Subprotocol("streamlit")]
    with connect(uri, origin=Origin(address), subprotocols=spoken, open_timeout=WAIT_S) as socket:
        asked = BackMsg()
        asked.rerun_script.query_string = ""
        socket.send(asked.SerializeToString())
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            message = ForwardMsg.FromString(socket.recv(timeout=WAIT_S, decode=False))
            kind = message.WhichOneof("type")
            if kind == "delta":
                shown.append(message.delta.new_element.html.body)
            if kind == "script_finished":
                return shown
    raise TimeoutError(f"the page was not drawn within {WAIT_S} s")


def test_starts_within_three_seconds_without_torch(server: tuple[str, psutil.Process]) -> None:
    """Catches an import, anywhere behind the first page, that a browser has to wait for."""
    address, process = server

    shown = "\n".join(draw(address))
    used = process.cpu_times()

    assert "demo" in shown, "the first page is the overview"
    assert used.user + used.system < MAX_CPU_S
    # Compiled modules lie in the process's memory map, whoever imported them.
    loaded = Path(f"/proc/{process.pid}/maps").read_text()
    assert not [name for name in HEAVY if name in loaded]


def test_the_pages_are_loaded_before_anybody_asks(server: tuple[str, psutil.Process]) -> None:
    """Catches a first visitor who waits for imports that nobody needed to wait for."""
    _, process = server
    deadline = time.monotonic() + WAIT_S
    while "/sqlalchemy/" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert time.monotonic() < deadline, "no page was loaded though nobody was served"
        time.sleep(0.1)
