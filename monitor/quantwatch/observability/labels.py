"""Labels stay few: each comes from the configuration or from a closed list, whatever is said.

A run id, a URL or a prompt in a label would make a new time series each time, until Prometheus or
this process is full. A value that doesn't belong becomes `other` and is counted; a meter with a
label that nobody has bounded can't be made.
"""

import re
import threading
from collections.abc import Iterable
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry

OTHER = "other"
REGISTRY = CollectorRegistry()

CLOSED: dict[str, frozenset[str]] = {
    "status": frozenset(
        {"succeeded", "failed", "timed_out", "cancelled", "abandoned", "skipped", "released"}
    ),
    "verdict": frozenset({"regression", "inconclusive", "warn", "improvement", "pass"}),
    "severity": frozenset({"warning", "critical"}),
    "state": frozenset({"pending", "firing", "recovering"}),
    "part": frozenset({"scheduler", "worker", "delivery", "metrics", "housekeeping"}),
    "stat": frozenset({"mean", "p50", "p90", "p95", "p99", "p999", "max"}),
}
"""Labels whose every value is known when this is written."""
MOST: dict[str, int] = {
    "check": 500,
    "variant": 2000,
    "channel": 200,
    "layer": 2000,
    "operation": 40,
    "outcome": 40,
    "version": 4,
    "label": 20,
}
"""Labels with names of the configuration or of our code, and how many may be seen at most."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_ULID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_HEX = re.compile(r"[0-9a-f]{32,}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_lock = threading.Lock()
_declared: dict[str, frozenset[str]] = {}
_seen: dict[str, set[str]] = {}


def declare(label: str, values: Iterable[str]) -> None:
    """Let only these values of a label through from now on: those of the configuration in use.

    Raises ValueError on a label that nobody bounds.
    """
    _require_bounded(label)
    with _lock:
        _declared[label] = frozenset(sorted(values)[: MOST.get(label, 0)])


def forget() -> None:
    """Drop what was declared and seen: for tests."""
    with _lock:
        _declared.clear()
        _seen.clear()


def bounded(label: str, value: str) -> str:
    """Return the value if it may be a label, else `other`, which is counted."""
    if value == OTHER or _allowed(label, value):
        return value
    REFUSED.labels(label=label).inc()
    return OTHER


def _allowed(label: str, value: str) -> bool:
    if label in CLOSED:
        return value in CLOSED[label]
    with _lock:
        if label in _declared:
            return value in _declared[label]
        seen = _seen.setdefault(label, set())
        if value not in seen and _looks_like_a_name(value) and len(seen) < MOST[label]:
            seen.add(value)
        return value in seen


def _looks_like_a_name(value: str) -> bool:
    """Say whether a value may be a name; ids and digests look like one, but are never the same."""
    if _ULID.fullmatch(value) or _HEX.fullmatch(value):
        return False
    return _NAME.fullmatch(value) is not None


def _require_bounded(label: str) -> None:
    if label not in CLOSED and label not in MOST:
        known = ", ".join(sorted([*CLOSED, *MOST]))
        raise ValueError(f"label {label!r} is not bounded by anything; bounded are: {known}")


class _Bounded:
    """Puts every label value through the guard."""

    def __init__(
        self, name: str, documentation: str, labelnames: Iterable[str] = (), **options: Any
    ) -> None:
        for label in labelnames:
            _require_bounded(label)
        options.setdefault("registry", REGISTRY if "_labelvalues" not in options else None)
        super().__init__(name, documentation, labelnames, **options)  # type: ignore[call-arg]

    def labels(self, *values: Any, **given: Any) -> Any:
        """Return the child for these labels; what may not be a label becomes `other`."""
        names: tuple[str, ...] = self._labelnames  # type: ignore[attr-defined]
        named = dict(zip(names, values, strict=True)) if values else given
        allowed = {label: bounded(label, str(value)) for label, value in named.items()}
        return super().labels(**allowed)  # type: ignore[misc]


class Counter(_Bounded, prometheus_client.Counter):
    """A counter with bounded labels."""


class Gauge(_Bounded, prometheus_client.Gauge):
    """A gauge with bounded labels."""


class Histogram(_Bounded, prometheus_client.Histogram):
    """A histogram with bounded labels."""


REFUSED = Counter(
    "quantwatch_labels_refused", "Label values that were put together as `other`.", ["label"]
)
