"""One guarded exchange: no redirects, proxies, cookies or netrc, bounded in time and size."""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING

import httpcore

from quantwatch.network.addresses import Network, Resolver
from quantwatch.network.sockets import (
    GuardedBackend,
    Journey,
    RefusedAddressError,
    UnknownHostError,
    system_resolver,
)

if TYPE_CHECKING:
    import httpx

_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (RefusedAddressError, "refused_address"),
    (UnknownHostError, "dns"),
    (httpcore.ConnectTimeout, "connect_timeout"),
    (ssl.SSLError, "tls"),
    (httpcore.ConnectError, "connect"),
    (httpcore.TimeoutException, "timeout"),
    (httpcore.NetworkError, "reset"),
    (httpcore.ProtocolError, "protocol"),
    (OSError, "connect"),
)
FAILURES = tuple(kind for kind, _ in _FAILURES)
"""What an exchange raises when the network, or whoever is at its other end, fails."""
ERROR_CODES = tuple(dict.fromkeys(code for _, code in _FAILURES))


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a request takes at most, in seconds, and how much of an answer is looked at."""

    connect_s: float = 5.0
    total_s: float = 20.0
    read_bytes: int = 64 * 1024
    kept_bytes: int = 1024


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent, and which private networks it may go to."""

    url: "httpx.URL"
    headers: Mapping[str, str]
    body: bytes
    networks: Sequence[Network]
    method: str = "POST"


class Wire:
    """Sends messages. Safe to share between threads."""

    def __init__(
        self,
        resolver: Resolver = system_resolver,
        connector: httpcore.NetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._resolver = resolver
        self._connector = connector
        self._tls = tls

    def exchange(
        self, message: Message, journey: Journey, limits: Limits
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers (lower case) and the first `read_bytes` of the answer.

        Raises one of `FAILURES`.
        """
        backend = GuardedBackend(journey, message.networks, self._resolver, self._connector)
        url, total = message.url, limits.total_s
        request = httpcore.Request(
            message.method,
            httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=_header_lines(message),
            content=message.body,
            extensions={"timeout": {"connect": limits.connect_s, "read": total, "write": total}},
        )
        tls = (self._tls or _trusted()) if url.scheme == "https" else None
        with httpcore.ConnectionPool(ssl_context=tls, network_backend=backend) as pool:
            response = pool.handle_request(request)
            try:
                start = _start_of(response, limits.read_bytes)
            finally:
                response.close()
        return response.status, _fields(response), start


def error_code(error: Exception) -> str:
    """Return the code of one of `FAILURES`."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, httpcore.ConnectError) and isinstance(cause, ssl.SSLError):
        return "tls"
    return next(code for kind, code in _FAILURES if isinstance(error, kind))


def retry_after(value: str | None, date: str | None = None) -> float | None:
    """Return the seconds of a Retry-After (a number, or a date against the answer's own date)."""
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value.strip()[:9])
    try:
        until = parsedate_to_datetime(value)
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):
        return None


def _header_lines(message: Message) -> list[tuple[bytes, bytes]]:
    fixed = {
        "host": message.url.netloc.decode("ascii"),
        "user-agent": "quantwatch",
        "accept": "*/*",
        # What is read is bounded; what it unpacks to would not be.
        "accept-encoding": "identity",
        "content-length": str(len(message.body)),
        "connection": "close",
    }
    lines = fixed | dict(message.headers)
    return [(k.encode("ascii"), v.encode("ascii")) for k, v in lines.items()]


def _start_of(response: httpcore.Response, most: int) -> bytes:
    """Read up to so many bytes; the rest is never asked for."""
    data = bytearray()
    for part in response.iter_stream():
        data += part[: most - len(data)]
        if len(data) >= most:
            break
    return bytes(data)


def _fields(response: httpcore.Response) -> dict[str, str]:
    return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in response.headers}


@cache
def _trusted() -> ssl.SSLContext:
    """Trust the system's authorities and those that httpx ships."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
