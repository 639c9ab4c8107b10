"""One guarded POST: no redirects, no proxies, no cookies, no netrc, bounded in time and size."""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpcore

from quantwatch.config.endpoints import Endpoint
from quantwatch.delivery.addresses import Resolver
from quantwatch.delivery.network import (
    GuardedBackend,
    Journey,
    RefusedAddressError,
    UnknownHostError,
    system_resolver,
)
from quantwatch.observability.redaction import scrub

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
ERROR_CODES = tuple(dict.fromkeys(code for _, code in _FAILURES))


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a request takes at most, in seconds, and how much of an answer is looked at."""

    connect_s: float = 5.0
    total_s: float = 20.0
    read_bytes: int = 64 * 1024
    kept_bytes: int = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request."""

    status: int | None = None
    error_code: str | None = None
    """refused_address, dns, connect, tls, timeout, …; None when the receiver answered in full."""
    text: str = ""
    """The error, or the start of what the receiver said; redacted."""
    left_machine: bool = True
    """Whether the receiver may have got it."""
    retry_after_s: float | None = None
    duration_s: float = 0.0


class Client:
    """Sends bodies to endpoints. Safe to share between threads."""

    def __init__(
        self,
        limits: Limits | None = None,
        resolver: Resolver = system_resolver,
        connector: httpcore.NetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._resolver = resolver
        self._connector = connector
        self._tls = tls or _trusted()

    def post(self, endpoint: Endpoint, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send one body; every trouble of the network becomes an answer, none is raised."""
        began = time.monotonic()
        journey = Journey(began + self.limits.total_s)
        try:
            status, fields, start = self._exchange(endpoint, headers, body, journey)
        except tuple(kind for kind, _ in _FAILURES) as error:
            return Answer(
                error_code=_code(error),
                text=self._kept(str(error).encode()) or type(error).__name__,
                left_machine=journey.left_machine,
                duration_s=time.monotonic() - began,
            )
        return Answer(
            status=status,
            text=self._kept(start),
            retry_after_s=retry_after(fields.get("retry-after"), fields.get("date")),
            duration_s=time.monotonic() - began,
        )

    def _exchange(
        self, endpoint: Endpoint, headers: Mapping[str, str], body: bytes, journey: Journey
    ) -> tuple[int, dict[str, str], bytes]:
        backend = GuardedBackend(journey, endpoint.networks, self._resolver, self._connector)
        url = endpoint.url
        request = httpcore.Request(
            "POST",
            httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=_header_lines(endpoint, headers, body),
            content=body,
            extensions={"timeout": self._timeouts()},
        )
        with httpcore.ConnectionPool(ssl_context=self._tls, network_backend=backend) as pool:
            response = pool.handle_request(request)
            try:
                start = _start_of(response, self.limits.read_bytes)
            finally:
                response.close()
        return response.status, _fields(response), start

    def _timeouts(self) -> dict[str, float]:
        limits = self.limits
        return {"connect": limits.connect_s, "read": limits.total_s, "write": limits.total_s}

    def _kept(self, data: bytes) -> str:
        """Return the start of a text without secrets; they are looked for before it is cut."""
        text = scrub(data.decode("utf-8", "replace"))
        return text.encode()[: self.limits.kept_bytes].decode("utf-8", "ignore")


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


def _header_lines(
    endpoint: Endpoint, headers: Mapping[str, str], body: bytes
) -> list[tuple[bytes, bytes]]:
    fixed = {
        "host": endpoint.url.netloc.decode("ascii"),
        "user-agent": "quantwatch",
        "accept": "*/*",
        # What is read is bounded; what it unpacks to would not be.
        "accept-encoding": "identity",
        "content-length": str(len(body)),
        "connection": "close",
    }
    return [(k.encode("ascii"), v.encode("ascii")) for k, v in (fixed | dict(headers)).items()]


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


def _code(error: Exception) -> str:
    cause = error.__cause__ or error.__context__
    if isinstance(error, httpcore.ConnectError) and isinstance(cause, ssl.SSLError):
        return "tls"
    return next(code for kind, code in _FAILURES if isinstance(error, kind))


def _trusted() -> ssl.SSLContext:
    """Trust the system's authorities and those that httpx ships."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
