"""The guarded socket: resolved once, every address judged, the peer compared before a byte is sent.

`httpcore` asks this backend for connections, so that nothing can be sent around it.
"""

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpcore

from quantwatch.network.addresses import Network, Resolver, refused

SocketOptions = Iterable[Any]


class RefusedAddressError(Exception):
    """The receiver lies where no message may go."""


class UnknownHostError(Exception):
    """The receiver's name has no address now."""


def system_resolver(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host by the system's resolver. Raises OSError when unknown."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass
class Journey:
    """One request on its way: how much time is left, and whether it may have arrived."""

    deadline: float
    """By `time.monotonic`."""
    left_machine: bool = field(default=False, init=False)
    """Set before the first byte of the request is written."""

    def within(self, seconds: float | None) -> float:
        """Return a limit that ends with the deadline. Raises ReadTimeout after it."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the time for the whole request is over")
        return left if seconds is None else min(left, seconds)


class GuardedBackend(httpcore.NetworkBackend):
    """Connects to allowed addresses only, for one request."""

    def __init__(
        self,
        journey: Journey,
        networks: Sequence[Network],
        resolver: Resolver = system_resolver,
        connector: httpcore.NetworkBackend | None = None,
    ) -> None:
        self._journey = journey
        self._networks = networks
        self._resolver = resolver
        self._connector = connector or httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: SocketOptions | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to one of the host's addresses. Raises RefusedAddressError, UnknownHostError."""
        _ = local_address
        until = time.monotonic() + self._journey.within(timeout)
        addresses = _resolve(self._resolver, host, port, self._journey.within(timeout))
        if wrong := refused(addresses, self._networks):
            raise RefusedAddressError(f"host {host} {wrong}")
        stream = self._first(addresses, port, until, socket_options)
        return _TimedStream(stream, self._journey)

    def _first(
        self, addresses: Sequence[str], port: int, until: float, options: SocketOptions | None
    ) -> httpcore.NetworkStream:
        """Connect to the first address that answers, all within one time limit."""
        failure: Exception = httpcore.ConnectTimeout("no time was left to connect")
        for address in addresses:
            left = until - time.monotonic()
            if left <= 0:
                break
            try:
                stream = self._connector.connect_tcp(address, port, left, socket_options=options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
                continue
            _require_peer(stream, address)
            return stream
        raise failure


class _TimedStream(httpcore.NetworkStream):
    """A stream that ends with its journey, however slowly the receiver drips."""

    def __init__(self, stream: httpcore.NetworkStream, journey: Journey) -> None:
        self._stream = stream
        self._journey = journey

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._journey.within(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        limit = self._journey.within(timeout)
        self._journey.left_machine = True
        self._stream.write(buffer, limit)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        limit = self._journey.within(timeout)
        secure = self._stream.start_tls(ssl_context, server_hostname, limit)
        return _TimedStream(secure, self._journey)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _require_peer(stream: httpcore.NetworkStream, address: str) -> None:
    """Compare whom the socket is connected to with whom it was meant for."""
    peer = stream.get_extra_info("server_addr")
    found = None if peer is None else ipaddress.ip_address(str(peer[0]))
    if found != ipaddress.ip_address(address):
        stream.close()
        raise RefusedAddressError(f"the socket to {address} is connected to {found}")


def _resolve(resolver: Resolver, host: str, port: int, seconds: float) -> Sequence[str]:
    """Return a host's addresses in bounded time: the system's resolver has no time limit.

    A lookup that hangs is left behind in its thread.
    """
    try:
        return [str(ipaddress.ip_address(host.strip("[]")))]
    except ValueError:
        pass  # A name.
    found: list[Sequence[str] | OSError] = []

    def look() -> None:
        try:
            found.append(resolver(host, port))
        except (OSError, UnicodeError) as error:
            found.append(error if isinstance(error, OSError) else OSError(str(error)))

    thread = threading.Thread(target=look, name="quantwatch-resolver", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise UnknownHostError(f"the lookup of {host} took longer than {seconds:.0f} s")
    if isinstance(found[0], OSError):
        raise UnknownHostError(f"{host} is unknown: {found[0].strerror or found[0]}")
    return found[0]
