"""From an exception to a reason of the closed list, and whether another attempt may help.

The monitor's own trouble has a reason and never a verdict.
"""

import errno
import os
import resource
import sys

from quantwatch.errors import (
    BaselineMismatchError,
    CaptureError,
    ConfigError,
    IncompatibleError,
    ModelError,
    PromptError,
    QuantwatchError,
    ResourceError,
    RunStoppedError,
    StoreError,
)
from quantwatch.observability.redaction import scrub
from quantwatch.store.attempts import Failure
from quantwatch.telemetry import disk_is_full

_BY_CLASS: tuple[tuple[type[BaseException], str, bool], ...] = (
    (StoreError, "storage_error", True),
    (CaptureError, "capture_failed", False),
    (ConfigError, "config_invalid", False),
    (PromptError, "config_invalid", False),
    (IncompatibleError, "model_invalid", False),
    (BaselineMismatchError, "baseline_incompatible", False),
    (ConnectionError, "download_failed", True),
    (TimeoutError, "download_failed", True),
    (MemoryError, "oom", True),
    (OSError, "storage_error", True),
)
"""The first that fits: (class, reason code, retryable). Memory may be free again in a minute; a
wrong file, model or hook stays wrong."""
_BY_WORDS: tuple[tuple[str, str, bool], ...] = (
    ("can't be reached", "download_failed", True),
    ("offline mode", "download_failed", False),
    ("does not exist; this machine has", "gpu_unavailable", True),
    ("does not exist", "weights_missing", False),
    ("has no weights", "weights_missing", False),
    ("weight files that are missing", "weights_missing", False),
    ("no such repository", "weights_missing", False),
    ("no such revision", "weights_missing", False),
    ("no such file", "weights_missing", False),
)
"""What our own ModelErrors say, since they are one class."""


def explain(error: BaseException) -> Failure:
    """Return why an attempt ended, scrubbed of secrets."""
    if isinstance(error, KeyboardInterrupt):
        return Failure("user", "interrupted by the user", "KeyboardInterrupt")
    code, retryable = reason_of(error)
    kind = type(error).__name__
    words = str(error) or kind
    shown = words if isinstance(error, QuantwatchError) else f"{kind}: {words}"
    return Failure(code, scrub(shown), kind, retryable)


def reason_of(error: BaseException) -> tuple[str, bool]:
    """Return the reason code of an exception, and whether to try again."""
    if isinstance(error, RunStoppedError):
        return error.reason_code, False
    if isinstance(error, ResourceError):
        return ("storage_error" if _is_full(error) else "oom"), True
    if isinstance(error, ModelError):
        return _of_model(error)
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError"):
        return "oom", True
    known = next(
        ((code, again) for kind, code, again in _BY_CLASS if isinstance(error, kind)), None
    )
    # What nobody foresaw is a mistake of ours: it would happen again.
    return known or ("internal", False)


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _of_model(error: ModelError) -> tuple[str, bool]:
    text = str(error)
    found = next(((code, again) for words, code, again in _BY_WORDS if words in text), None)
    return found or ("model_invalid", False)


def _is_full(error: ResourceError) -> bool:
    cause = error.__cause__
    return (cause is not None and disk_is_full(cause)) or os.strerror(errno.ENOSPC) in str(error)
