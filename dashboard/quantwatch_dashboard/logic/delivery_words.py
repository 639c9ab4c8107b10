"""States of endpoints and of deliveries: icon, word and color, the same on every page. Pure."""

from typing import NamedTuple

from quantwatch.delivery.health import AUTO, ENABLED, GONE, INVALID
from quantwatch.domain import Verdict
from quantwatch.store.applied import REMOVED


class Look(NamedTuple):
    """How a state is shown. `color` is that of a verdict, None for none."""

    icon: str
    word: str
    color: Verdict | None = None


_DELIVERIES = {
    "pending": Look("…", "Pending"),
    "sending": Look("…", "Being sent"),
    "retry_wait": Look("!", "Waits for another try", Verdict.WARN),
    "grouped": Look("…", "In a digest"),
    "delivered": Look("✓", "Delivered", Verdict.PASS),
    "dead": Look("✕", "Dead letter", Verdict.REGRESSION),
    "suppressed": Look("–", "Not sent: over"),
    "cancelled": Look("–", "Cancelled"),
}
_ENDPOINTS = {
    ENABLED: Look("✓", "Enabled", Verdict.PASS),
    AUTO: Look("✕", "Disabled", Verdict.REGRESSION),
    GONE: Look("✕", "Disabled", Verdict.REGRESSION),
    INVALID: Look("✕", "Refused", Verdict.REGRESSION),
    REMOVED: Look("–", "Removed"),
}
_FAILING = Look("!", "Failing", Verdict.WARN)
_WHY = {
    AUTO: "after days without any success",
    GONE: "the receiver is gone (410)",
    INVALID: "its address is not allowed",
    REMOVED: "no longer in the configuration",
}


def delivery(state: str) -> Look:
    """Return how a delivery's state is shown."""
    return _DELIVERIES.get(state, Look("?", state))


def endpoint(state: str, *, failing: bool = False) -> Look:
    """Return how an endpoint's state is shown; `failing` since its last success."""
    if state == ENABLED and failing:
        return _FAILING
    return _ENDPOINTS.get(state, Look("?", state))


def usual_reason(state: str) -> str:
    """Return why an endpoint is in a state, where nothing more is known."""
    return _WHY.get(state, "")


def can_be_enabled(state: str) -> bool:
    """Say whether an endpoint is sent nothing until somebody enables it."""
    return state not in (ENABLED, REMOVED)
