"""Words shared by all stages: scopes, verdicts, states. No torch, no SQL, no clock."""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NewType

Json = Mapping[str, Any]
Scope = NewType("Scope", str)
"""Canonical name of a measured place, the same on every architecture: ``embedding``, ``layers.12``,
``layers.12.attention``, ``layers.12.mlp``, ``layers.12.mlp.down_proj``, ``final_norm``, ``head``,
``model``."""

MODEL = Scope("model")
EMBEDDING = Scope("embedding")
FINAL_NORM = Scope("final_norm")
HEAD = Scope("head")


def layer_index(scope: str) -> int | None:
    """Return the number of the decoder layer a scope belongs to, None outside the layers."""
    found = re.match(r"layers\.(\d+)(\.|$)", scope)
    return int(found.group(1)) if found else None


def is_layer(scope: str) -> bool:
    """Say whether a scope is a whole decoder layer (``layers.12``)."""
    return re.fullmatch(r"layers\.\d+", scope) is not None


class Verdict(StrEnum):
    """What a succeeded run says. Ordered by `severity_order`, worst first."""

    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    WARN = "warn"
    IMPROVEMENT = "improvement"
    PASS = "pass"

    @classmethod
    def worst(cls, verdicts: Sequence["Verdict"]) -> "Verdict":
        """Return the worst of several verdicts; raises ValueError on none."""
        return min(verdicts, key=list(cls).index)

    @property
    def rank(self) -> int:
        """Its place among all verdicts, 0 for the worst."""
        return list(type(self)).index(self)


class RunStatus(StrEnum):
    """Execution status: the monitor's own trouble never looks like a regression.

    queued → claimed → preparing → measuring → finalizing → succeeded; the other ends never change.
    """

    QUEUED = "queued"
    CLAIMED = "claimed"
    PREPARING = "preparing"
    MEASURING = "measuring"
    FINALIZING = "finalizing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"
    SKIPPED = "skipped"

    @property
    def is_ended(self) -> bool:
        """Whether a run in this state never changes again."""
        return self not in _ACTIVE and self is not RunStatus.QUEUED

    @property
    def is_active(self) -> bool:
        """Whether a worker holds the run."""
        return self in _ACTIVE


REASON_CODES = (
    *("oom", "weights_missing", "download_failed", "gpu_unavailable", "gpu_shared"),
    *("storage_error", "config_invalid", "killed", "lease_lost", "deadline", "user", "missed"),
    *("overlap", "paused", "maintenance", "upstream_failed", "baseline_missing"),
    *("baseline_incompatible", "not_reproducible", "too_few_samples", "non_finite"),
    *("capture_failed", "model_invalid", "quarantined", "internal"),
)
"""Why a run ended as it did: a closed list, beside a text for people."""
_SKIPPED = {
    "missed": "nobody scheduled at that time, and the slot is too old to be caught up",
    "overlap": "the run before it had not ended",
    "paused": "the check was paused",
    "maintenance": "a maintenance window was open",
    "quarantined": "the check was in quarantine",
}


def reason_words(code: str | None) -> str | None:
    """Return a reason code in words: a slot that was skipped has no text of its own."""
    return None if code is None else _SKIPPED.get(code, code.replace("_", " "))


class Severity(StrEnum):
    """`warning` turns the verdict to warn, `critical` to regression."""

    WARNING = "warning"
    CRITICAL = "critical"


_ACTIVE = frozenset(
    {RunStatus.CLAIMED, RunStatus.PREPARING, RunStatus.MEASURING, RunStatus.FINALIZING}
)
