"""A reverse proxy at its simplest: one more header on the first request of each connection."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


@contextmanager
def adding_proxy(url: str, header: str) -> Iterator[str]:
    """Forward to a server on the loopback, adding a header; give the proxy's address."""
    place = urlsplit(url)
    target = (str(place.hostname), int(place.port or 80))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, target, header), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _serve(listener: socket.socket, target: tuple[str, int], header: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            job = (client, target, header)
            threading.Thread(target=_connection, args=job, daemon=True).start()


def _connection(client: socket.socket, target: tuple[str, int], header: str) -> None:
    # An open page tries again after the server has stopped: that is no fault of the proxy.
    with client, contextlib.suppress(OSError), socket.create_connection(target) as server:
        back = threading.Thread(target=_pump, args=(server, client, ""), daemon=True)
        back.start()
        _pump(client, server, header)
        back.join()


def _pump(source: socket.socket, sink: socket.socket, header: str) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if header:
                line, end, rest = data.partition(b"\r\n")
                data, header = line + end + header.encode() + b"\r\n" + rest, ""
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
