"""What an answer means for the message and for the endpoint."""

from dataclasses import dataclass
from typing import Literal

from quantwatch.delivery.backoff import MOST_ATTEMPTS
from quantwatch.delivery.client import Answer

Next = Literal["delivered", "retry", "dead"]
Effect = Literal["success", "failure", "throttle", "gone", "invalid"]

FEW_ATTEMPTS = 3
"""For answers that say that the message itself is not wanted."""
_UNWANTED = frozenset({400, 404, 405, 413, 415, 422})
_THROTTLE = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comes next for a message, and what the endpoint is seen to do."""

    next: Next
    effect: Effect
    error_code: str | None = None
    """http_500, timeout, dns, …; None when delivered."""


def outcome_of(answer: Answer, attempt: int, *, once: bool = False) -> Outcome:
    """Judge the answer to an attempt (1 is the first); `once` never retries (test messages)."""
    code = answer.error_code
    if code is None:
        return _of_status(answer.status or 0, attempt, once=once)
    if code == "refused_address":
        return Outcome("dead", "invalid", code)
    return Outcome(_again(attempt, 1 if once else MOST_ATTEMPTS), "failure", code)


def _of_status(status: int, attempt: int, *, once: bool) -> Outcome:
    if 200 <= status < 300:
        return Outcome("delivered", "success")
    code = f"http_{status}"
    if status == 410:
        return Outcome("dead", "gone", code)
    most = 1 if once else FEW_ATTEMPTS if status in _UNWANTED else MOST_ATTEMPTS
    return Outcome(_again(attempt, most), "throttle" if status in _THROTTLE else "failure", code)


def _again(attempt: int, most: int) -> Next:
    return "retry" if attempt < most else "dead"
