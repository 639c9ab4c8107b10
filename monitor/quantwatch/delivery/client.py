"""One guarded POST to a receiver: every trouble of the network becomes an answer."""

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpcore

from quantwatch.config.endpoints import Endpoint
from quantwatch.network.addresses import Resolver
from quantwatch.network.exchange import (
    ERROR_CODES,
    FAILURES,
    Limits,
    Message,
    Wire,
    error_code,
    retry_after,
)
from quantwatch.network.sockets import Journey, system_resolver
from quantwatch.observability.redaction import scrub

__all__ = ["ERROR_CODES", "Answer", "Client", "Limits", "retry_after"]


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
        self._wire = Wire(resolver, connector, tls)

    def post(self, endpoint: Endpoint, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send one body; every trouble of the network becomes an answer, none is raised."""
        began = time.monotonic()
        journey = Journey(began + self.limits.total_s)
        message = Message(endpoint.url, headers, body, endpoint.networks)
        try:
            status, fields, start = self._wire.exchange(message, journey, self.limits)
        except FAILURES as error:
            return Answer(
                error_code=error_code(error),
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

    def _kept(self, data: bytes) -> str:
        """Return the start of a text without secrets; they are looked for before it is cut."""
        text = scrub(data.decode("utf-8", "replace"))
        return text.encode()[: self.limits.kept_bytes].decode("utf-8", "ignore")
