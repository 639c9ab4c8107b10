"""What the end of a run's process says, when the process could not write it down itself.

Only a death by a signal may be the check's own doing: out of memory, a crash in a native library.
Everything else is trouble around it (the database, the disk, a stop), which must not put a check
into quarantine.
"""

import signal

from quantwatch.store.attempts import Failure

NO_DATABASE = 74
"""Exit code: the database could not be used before the run was found in it."""
ORPHANED = 75
"""Exit code when the worker is gone: a service that is killed leaves nothing behind."""
GAVE_UP = 76
"""Exit code: the lease ran out, or the end could not be written, with the database away."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What stops a service. They are the worker's to heed, never a fault of the check."""
_STARTUP = ("internal", "ChildStartup")
_KNOWN = {
    NO_DATABASE: ("storage_error", "StoreError"),
    GAVE_UP: ("lease_lost", "LeaseLostError"),
    **{-number: ("killed", "Stopped") for number in STOP_SIGNALS},
}


def is_death(code: int) -> bool:
    """Say whether a process was killed by what it did, or by whoever cleans up behind it."""
    return code < 0 and code not in _KNOWN


def failure_of(code: int) -> Failure:
    """Return why an attempt ended whose process left with this code; negative is a signal."""
    reason, kind = _KNOWN.get(code, _STARTUP)
    text = f"its process ended without a word: {_words(code)}"
    if is_death(code):
        return Failure("killed", text)
    return Failure(reason, text, kind, retryable=True)


def _words(code: int) -> str:
    if code == GAVE_UP:
        return "it lost its lease, or could not write its end for as long as a lease lasts"
    if code == NO_DATABASE:
        return "it could not use the database"
    return f"it exited with {code}" if code >= 0 else f"killed by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
