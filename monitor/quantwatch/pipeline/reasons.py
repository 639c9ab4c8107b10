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
    WorkersLostError,
)
from quantwatch.observability.redaction import scrub
from quantwatch.store.attempts import Failure
from quantwatch.telemetry import disk_is_full

_BY_CLASS: tuple[tuple[type[BaseException], str, bool], ...] = (
    (StoreError, "storage_error", True),
    (WorkersLostError, "killed", True),
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
    ("gave no answer", "download_failed", True),
    ("offline mode", "download_failed", False),
    ("does not exist; this machine has", "gpu_unavailable", True),
    ("does not exist", "weights_missing", False),
    ("has no weights", "weights_missing", False),
    ("weight files that are missing", "weights_missing", False),
    ("no such repository", "weights_missing", False),
    ("no such revision", "weights_missing", False),
    ("no such file", "weights_missing", False),
    ("run it again", "model_invalid", True),
)
"""What our own ModelErrors say, since they are one class."""

_OF_ACCELERATORS: tuple[tuple[str, str, bool], ...] = (
    ("out of memory", "oom", True),
    ("alloc_failed", "oom", True),
    ("can't allocate memory", "oom", True),
    ("ecc error", "gpu_unavailable", True),
    ("uncorrectable", "gpu_unavailable", True),
    ("device unavailable", "gpu_unavailable", True),
    ("busy or unavailable", "gpu_unavailable", True),
    ("no cuda-capable device", "gpu_unavailable", True),
    ("invalid device ordinal", "gpu_unavailable", True),
    ("gpu is lost", "gpu_unavailable", True),
    ("fallen off the bus", "gpu_unavailable", True),
    ("initialization error", "gpu_unavailable", True),
    ("system not yet initialized", "gpu_unavailable", True),
    ("hardware", "gpu_unavailable", True),
)
"""What drivers say, in lower case. Another GPU, or this one in a minute, may do; a kernel that
writes where it must not (illegal address, device-side assert) does it again."""


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
    if isinstance(error, RuntimeError) and (found := _of_accelerator(error)) is not None:
        return found
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


def _of_accelerator(error: RuntimeError) -> tuple[str, bool] | None:
    """Return the reason of an error of a device; None when it is none."""
    kind, text = type(error).__name__, str(error).lower()
    if kind == "OutOfMemoryError":
        return "oom", True
    from_device = kind == "AcceleratorError" or "cuda error" in text or "hip error" in text
    if not from_device and "out of memory" not in text and "can't allocate memory" not in text:
        return None
    found = next(((code, again) for words, code, again in _OF_ACCELERATORS if words in text), None)
    return found or ("internal", False)


def _is_full(error: ResourceError) -> bool:
    cause = error.__cause__
    return (cause is not None and disk_is_full(cause)) or os.strerror(errno.ENOSPC) in str(error)
