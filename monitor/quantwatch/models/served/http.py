"""JSON over the guarded exchange, tried again where that may help.

The address is the operator's own choice: loopback and private networks are allowed, link-local ones
and metadata services are not. Redirects are not followed, the token goes to that one server only.
"""

import ipaddress
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quantwatch.config.secrets import Secret
from quantwatch.models.served.trouble import (
    GarbledAnswerError,
    NoAnswerError,
    StaleAnswerError,
    UnusableServerError,
    readable,
)
from quantwatch.network.exchange import FAILURES, Limits, Message, Wire, error_code, retry_after
from quantwatch.network.sockets import Journey, RefusedAddressError
from quantwatch.observability.redaction import scrub

if TYPE_CHECKING:
    import httpx

_OWN = (
    *("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    *("::1/128", "fc00::/7"),
)
OWN_NETWORKS = tuple(ipaddress.ip_network(text) for text in _OWN)
"""Where an operator's own server may be."""
MOST_BYTES = 64 << 20
"""Of one answer: 2,000 log-probabilities at 400 positions."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_BUSY = (408, 425, 429)
_MOST_DIGITS = 19
_SHOWN = 200

Sleep = Callable[[float], None]
Checked = Callable[[Any], Any]


class JsonClient:
    """Asks one server. `num_requests` and `num_retries` count what was sent."""

    def __init__(
        self,
        base: "httpx.URL",
        token: Secret | None,
        *,
        timeout_s: float,
        attempts: int,
        sleep: Sleep = time.sleep,
    ) -> None:
        self.base = base
        self.num_requests = self.num_retries = 0
        self._token = token
        self._limits = Limits(total_s=timeout_s, read_bytes=MOST_BYTES + 1)
        self._attempts = attempts
        self._sleep = sleep
        self._wire = Wire()

    def get(self, path: str) -> Any:
        """Return a document; None where the server has no such path. Raises as `post`."""
        return self._ask("GET", path, bytes, lambda document: document)

    def post(self, path: str, body: Callable[[], Any], checked: Checked) -> Any:
        """Return what `checked` makes of the answer to a request, tried again when it is stale.

        `body` makes the request anew for each attempt: what an earlier one left in the server's
        cache must not answer the next.

        Raises:
            NoAnswerError: every attempt met a time-out, 429, 5xx, an answer cut off or a stale one.
            UnusableServerError: the server or `checked` says that asking again is no use.
        """
        return self._ask(
            "POST", path, lambda: json.dumps(body(), allow_nan=False).encode(), checked
        )

    def _ask(self, method: str, path: str, body: Callable[[], bytes], checked: Checked) -> Any:
        reason = ""
        for attempt in range(1, self._attempts + 1):
            wait_s: float | None = None
            try:
                status, fields, data = self._send(method, path, body())
                if status == 404 and method == "GET":
                    return None
                if (why := self._failed(status, data, path)) is None:
                    return checked(_document(data))
                reason = why
                wait_s = retry_after(fields.get("retry-after"), fields.get("date"))
            except RefusedAddressError as error:
                raise UnusableServerError(f"{self.base.host}: {error}") from error
            except FAILURES as error:
                reason = f"{error_code(error)}: {_words(error)}"
            except (GarbledAnswerError, StaleAnswerError) as error:
                reason = str(error)
            if attempt < self._attempts:
                self._wait(attempt, wait_s)
        raise NoAnswerError(reason)

    def _send(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        self.num_requests += 1
        headers = {"content-type": "application/json"} if body else {}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token.reveal()}"
        target = self.base.raw_path.decode("ascii").rstrip("/") + path
        url = self.base.copy_with(raw_path=target.encode("ascii"))
        journey = Journey(time.monotonic() + self._limits.total_s)
        message = Message(url, headers, body, OWN_NETWORKS, method)
        return self._wire.exchange(message, journey, self._limits)

    def _failed(self, status: int, data: bytes, path: str) -> str | None:
        """Return why to try again, None for an answer.

        Raises UnusableServerError where that is no use.
        """
        if 200 <= status < 300:
            return None
        said = readable(scrub(" ".join(data.decode("utf-8", "replace").split())), _SHOWN)
        if status in _BUSY or status >= 500:
            return f"HTTP {status}"
        if 300 <= status < 400:
            raise UnusableServerError(
                f"{self.base.host}{path} redirects (HTTP {status}): not followed"
            )
        raise UnusableServerError(
            f"{self.base.host}{path} answers HTTP {status}: {said or 'nothing else'}"
        )

    def _wait(self, attempt: int, asked_s: float | None) -> None:
        """Wait before the next attempt: twice as long each time, or as the server asks."""
        self.num_retries += 1
        planned = _FIRST_WAIT_S * 2 ** (attempt - 1)
        self._sleep(min(max(planned, asked_s or 0.0), _LONGEST_WAIT_S))


def _document(data: bytes) -> Any:
    if len(data) > MOST_BYTES:
        raise GarbledAnswerError(f"an answer of more than {MOST_BYTES >> 20} MiB")
    try:
        return json.loads(data, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise GarbledAnswerError("the answer is no JSON, or cut off") from error


def _whole(digits: str) -> int:
    """Read a whole number that has a place in 64 bits: no other one means anything here."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError
    return int(digits)


def _words(error: Exception) -> str:
    return scrub(str(error))[:_SHOWN] or type(error).__name__
