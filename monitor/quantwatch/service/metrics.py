"""The part `metrics`: /metrics, /healthz and /readyz over plain HTTP."""

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from quantwatch.errors import UserError
from quantwatch.observability import logs
from quantwatch.service.exposition import Exposition
from quantwatch.service.health import Answer, Health

TIMEOUT_S = 10.0
"""How long a client may take to send its request."""
log = logs.get(__name__)


class MetricsServer:
    """Serves the endpoints in a thread. Nothing here changes anything, and nobody is asked who."""

    name = "metrics"

    def __init__(self, address: tuple[str, int], exposition: Exposition, health: Health) -> None:
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        try:
            self._server = _Server(address, exposition, health)
        except OSError as error:
            raise UserError(
                f"service.metrics_address: {address[0]}:{address[1]} can't be listened on: "
                f"{error.strerror}"
            ) from error

    @property
    def port(self) -> int:
        """The port it listens on, also when any free one was asked for."""
        return int(self._server.server_address[1])

    @property
    def is_alive(self) -> bool:
        """Whether it answers."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to answer."""
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()
        host, port = self._server.server_address[:2]
        log.info("metrics are served", address=str(host), port=port)

    def stop(self, wait_s: float) -> None:
        """Answer no more."""
        if self.is_alive:
            self._server.shutdown()
        self._server.server_close()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _serve(self) -> None:
        try:
            self._server.serve_forever(poll_interval=0.2)
        # The supervisor ends the process with it.
        except BaseException as error:  # noqa: BLE001
            self.failure = error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], exposition: Exposition, health: Health) -> None:
        self.exposition, self.health = exposition, health
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no trouble of ours."""
        _ = request
        log.debug("request not answered", client=str(client_address))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = TIMEOUT_S
    server_version = "quantwatch"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer one of the three pages."""
        path = self.path.split("?", 1)[0]
        if path == "/metrics":
            self._send(HTTPStatus.OK, CONTENT_TYPE_LATEST, self.server.exposition.render())
        elif path in ("/healthz", "/livez"):
            self._say(self.server.health.live())
        elif path == "/readyz":
            self._say(self.server.health.ready())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"/metrics /healthz /readyz\n")

    def log_message(self, *_: Any) -> None:
        """Keep silent: every scrape would be a line."""

    def _say(self, answer: Answer) -> None:
        status = HTTPStatus.OK if answer.is_fine else HTTPStatus.SERVICE_UNAVAILABLE
        document = {"status": "ok" if answer.is_fine else "not ok", **answer.details}
        self._send(status, "application/json", json.dumps(document).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)
