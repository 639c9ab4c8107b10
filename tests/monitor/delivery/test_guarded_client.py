"""The guarded client against fake resolvers, fake sockets and real misbehaving servers."""

import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest
from tests.monitor.delivery.loopback import LOOPBACK, Receiver, Reply, client, endpoint_to

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.client import Client, Limits, retry_after

Misbehave = Callable[[BaseHTTPRequestHandler], None]


def post(endpoint: Endpoint, sender: Client | None = None, body: bytes = b"{}") -> Any:
    return (sender or client()).post(endpoint, {"content-type": "application/json"}, body)


def named(port: int, host: str = "receiver.example", **fields: Any) -> Endpoint:
    url = httpx.URL(f"http://{host}:{port}/hook")
    return Endpoint(name="hook", url=url, **fields)


class Resolver:
    """Answers each look-up with the next list."""

    def __init__(self, *answers: Sequence[str] | OSError) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer


class Sockets(httpcore.NetworkBackend):
    """Notes who is connected to; all sockets lead to `port` on the loopback, or claim a peer."""

    def __init__(self, port: int | None = None, peer: str | None = None) -> None:
        self.port = port
        self.peer = peer
        self.connected: list[str] = []
        self.written = b""

    def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        self.connected.append(host)
        if self.port is None:
            raise httpcore.ConnectError("refused")
        inner = httpcore.SyncBackend().connect_tcp("127.0.0.1", self.port, timeout=2)
        return _Stream(inner, self, self.peer or host)


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: Any, sockets: Sockets, peer: str) -> None:
        self.inner, self.sockets, self.peer = inner, sockets, peer

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return bytes(self.inner.read(max_bytes, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.sockets.written += buffer
        self.inner.write(buffer, timeout)

    def close(self) -> None:
        self.inner.close()

    def get_extra_info(self, info: str) -> Any:
        return (self.peer, 80) if info == "server_addr" else self.inner.get_extra_info(info)


def test_resolved_once_and_pinned(receiver: Receiver) -> None:
    """Catches B27: DNS that says public first and 169.254.169.254 to the second question."""
    resolver = Resolver(["93.184.216.34"], ["169.254.169.254"])
    sockets = Sockets(receiver.port)
    answer = post(named(80), client(resolver=resolver, connector=sockets))
    assert answer.status == 200
    assert resolver.asked == ["receiver.example"]
    assert sockets.connected == ["93.184.216.34"]
    assert receiver.requests[0].headers["host"] == "receiver.example"


@pytest.mark.parametrize(
    "addresses",
    [["169.254.169.254"], ["93.184.216.34", "10.0.0.1"], ["::1"], ["::ffff:127.0.0.1"]],
    ids=["metadata", "mixed", "v6-loopback", "mapped"],
)
def test_refused_before_any_socket(addresses: list[str]) -> None:
    """Catches a private address that is connected to before it is judged."""
    sockets = Sockets()
    answer = post(named(80), client(resolver=Resolver(addresses), connector=sockets))
    assert (answer.error_code, answer.left_machine) == ("refused_address", False)
    assert sockets.connected == []


def test_peer_is_compared_before_a_byte_is_sent(receiver: Receiver) -> None:
    """Catches CVE-2026-64849: a socket that ends up somewhere else than it was meant for."""
    sockets = Sockets(receiver.port, peer="169.254.169.254")
    answer = post(named(80), client(resolver=Resolver(["93.184.216.34"]), connector=sockets))
    assert (answer.error_code, answer.left_machine) == ("refused_address", False)
    assert sockets.written == b""
    assert receiver.requests == []


def test_second_address_when_the_first_is_down(receiver: Receiver, closed_port: int) -> None:
    """Catches a receiver with IPv6 and IPv4 that is called down because one of them is."""

    class FirstFails(Sockets):
        def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
            if not self.connected:
                self.connected.append(host)
                raise httpcore.ConnectError("unreachable")
            return super().connect_tcp(host, port, *args, **kwargs)

    sockets = FirstFails(receiver.port)
    resolver = Resolver(["2606:4700::1111", "93.184.216.34"])
    assert post(named(80), client(resolver=resolver, connector=sockets)).status == 200
    assert sockets.connected == ["2606:4700::1111", "93.184.216.34"]


def test_unknown_host_is_retried_later() -> None:
    """Catches a DNS outage that kills messages."""
    resolver = Resolver(socket.gaierror(-2, "Name or service not known"))
    answer = post(named(80), client(resolver=resolver))
    assert (answer.error_code, answer.left_machine) == ("dns", False)


def test_hanging_lookup_ends() -> None:
    """Catches a resolver without time limit that stops a lane for minutes."""
    release = threading.Event()

    def hang(_host: str, _port: int) -> Sequence[str]:
        release.wait(30)
        return []

    began = time.monotonic()
    answer = post(named(80), client(resolver=hang, connect_s=0.2))
    release.set()
    assert answer.error_code == "dns"
    assert time.monotonic() - began < 2


def test_environment_is_ignored(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a proxy or a netrc of the host that sees our messages."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login canary password canary\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert post(endpoint_to(receiver.port)).status == 200
    assert "authorization" not in receiver.requests[0].headers


def test_cookies_are_forgotten(receiver: Receiver) -> None:
    """Catches a client that carries a receiver's cookies to its next request."""
    receiver.answer = lambda _request: Reply(200, {"set-cookie": "id=1"})
    sender = client()
    for _ in range(2):
        post(endpoint_to(receiver.port), sender)
    assert "cookie" not in receiver.requests[1].headers


def drip(handler: BaseHTTPRequestHandler) -> None:
    """Send the answer's body one byte at a time, for ever."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    try:
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.02)
    except OSError:
        return


def drip_headers(handler: BaseHTTPRequestHandler) -> None:
    """Send header lines for ever."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    try:
        while True:
            handler.wfile.write(b"x: y\r\n")
            time.sleep(0.02)
    except OSError:
        return


def cut_off(handler: BaseHTTPRequestHandler) -> None:
    """Close in the middle of the answer."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")


def say_nothing(handler: BaseHTTPRequestHandler) -> None:
    """Accept the request, then never answer."""
    handler.connection.settimeout(5)
    handler.connection.recv(1)


def close_at_once(handler: BaseHTTPRequestHandler) -> None:
    """Close without an answer."""


def reset(handler: BaseHTTPRequestHandler) -> None:
    """Reset the connection."""
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()


def garbage(handler: BaseHTTPRequestHandler) -> None:
    """Answer something that is no HTTP."""
    handler.wfile.write(b"220 mail.example ESMTP\r\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misbehave", "codes"),
    [
        (drip, {"timeout"}),
        (drip_headers, {"timeout"}),
        (say_nothing, {"timeout"}),
        (cut_off, {"protocol"}),
        (close_at_once, {"protocol"}),
        (reset, {"reset", "protocol"}),
        (garbage, {"protocol"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_misbehaving_receivers(receiver: Receiver, misbehave: Misbehave, codes: set[str]) -> None:
    """Catches a receiver that holds a lane for ever, or whose trouble raises."""
    receiver.answer = lambda _request: Reply(misbehave=misbehave)
    began = time.monotonic()
    answer = post(endpoint_to(receiver.port), client(total_s=0.5))
    assert time.monotonic() - began < 2
    assert answer.error_code in codes
    assert answer.left_machine
    assert answer.status is None


def test_nobody_listens(closed_port: int) -> None:
    """Catches a refused connection that is counted as perhaps received."""
    answer = post(endpoint_to(closed_port))
    assert (answer.error_code, answer.left_machine) == ("connect", False)


def test_long_answers_are_read_in_part(receiver: Receiver) -> None:
    """Catches an answer of a gigabyte in memory or in the database."""
    receiver.answer = lambda _request: Reply(500, body=b"x" * 4_000_000)
    answer = post(endpoint_to(receiver.port))
    assert answer.status == 500
    assert len(answer.text) == 1024


def test_answer_is_redacted(receiver: Receiver) -> None:
    """Catches B29: a receiver that echoes our token into our database."""
    endpoint = endpoint_to(receiver.port)
    secret = endpoint.secrets[0].reveal()
    receiver.answer = lambda _request: Reply(500, body=f"bad key {secret} at".encode())
    text = post(endpoint).text
    assert secret not in text
    assert text.startswith("bad key")


@pytest.mark.parametrize(
    ("value", "date", "expected"),
    [
        ("120", None, 120.0),
        ("0", None, 0.0),
        ("Sun, 29 Nov 2026 02:02:00 GMT", "Sun, 29 Nov 2026 02:00:00 GMT", 120.0),
        ("Sun, 29 Nov 2026 01:00:00 GMT", "Sun, 29 Nov 2026 02:00:00 GMT", 0.0),
        ("soon", None, None),
        ("-5", None, None),
        ("1e9", None, None),
        (None, None, None),
    ],
)
def test_retry_after(value: str | None, date: str | None, expected: float | None) -> None:
    """Catches a Retry-After that crashes the sender; a date is measured by the receiver's clock."""
    assert retry_after(value, date) == expected


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for receiver.example."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-keyout", str(key), "-out", str(cert), "-subj", "/CN=receiver.example"),
        *("-addext", "subjectAltName=DNS:receiver.example"),
    ]
    subprocess.run(words, check=True, capture_output=True, env=dict(os.environ))
    return key, cert


@pytest.mark.parametrize(
    ("host", "trusted", "code"),
    [
        pytest.param("receiver.example", True, None, id="right-name"),
        pytest.param("other.example", True, "tls", id="wrong-name"),
        pytest.param("receiver.example", False, "tls", id="unknown-authority"),
    ],
)
def test_tls_keeps_the_name(
    receiver: Receiver, certificate: tuple[Path, Path], host: str, trusted: bool, code: str | None
) -> None:
    """Catches a pinned address that turns off the check of the certificate's name."""
    key, cert = certificate
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    seen: list[str | None] = []
    server.sni_callback = lambda _sock, name, _context: seen.append(name)
    receiver.server.socket = server.wrap_socket(receiver.server.socket, server_side=True)
    trust = ssl.create_default_context()
    if trusted:
        trust.load_verify_locations(cert)
    sender = Client(Limits(total_s=3), resolver=Resolver(["127.0.0.1"]), tls=trust)
    url = httpx.URL(f"https://{host}:{receiver.port}/hook")
    answer = post(Endpoint(name="hook", url=url, networks=LOOPBACK), sender)
    assert answer.error_code == code
    assert seen == [host]
    assert answer.left_machine is (code is None)
