"""One exception tree. The exit code of the command line follows from the branch.

QuantwatchError
├── UserError            exit 2: something the user named is wrong, missing or corrupt
│   ├── ConfigError      quantwatch.toml: file, key, value and what is allowed
│   ├── ModelError       a model, checkpoint or tokenizer can't be loaded
│   ├── PromptError      a prompt file is missing, empty, unreadable or too long
│   ├── IncompatibleError  two things can't be compared (tokenizer, architecture, vocabulary)
│   └── NoDatabaseError  the database isn't where it was said to be (a StoreError as well)
├── BaselineMismatchError  exit 4: the baseline measured something else
└── MonitorError         exit 3: the monitor itself failed
    ├── CaptureError     a hook did not fire, logits changed under observation, …
    ├── StoreError       database locked, full, read-only, behind or ahead of this program
    │   └── ConflictError  a transaction ended in favour of another one
    ├── ResourceError    not enough memory or disk
    ├── WorkersLostError  the processes that measure a run's batches died
    ├── LeaseLostError   the run is no longer this worker's; what it found is dropped
    └── RunStoppedError  the run was cancelled or ran past its deadline
"""


class QuantwatchError(Exception):
    """Any error that is shown to the user as one clear line."""

    exit_code = 3


class UserError(QuantwatchError, ValueError):
    """Something the user named is wrong, missing, corrupt or incompatible."""

    exit_code = 2


class NotFoundError(UserError):
    """A run, check, alert or endpoint that the database does not have."""


class ConfigError(UserError):
    """A configuration file or value; the message names file, key, value and what is allowed."""


class ModelError(UserError):
    """A model, checkpoint or tokenizer that can't be loaded or isn't what it claims to be."""


class PromptError(UserError):
    """A prompt file or suite that is missing, empty, unreadable or too long for the model."""


class IncompatibleError(UserError):
    """A reference and a candidate that can't be compared; the message names what differs."""


class BaselineMismatchError(QuantwatchError):
    """The baseline run measured something else; the message names the digests that differ."""

    exit_code = 4


class MonitorError(QuantwatchError):
    """The monitor itself failed. Never a regression."""


class CaptureError(MonitorError):
    """A tap did not fire exactly once, or observing a model changed its logits."""


class StoreError(MonitorError):
    """The database is locked, full, read-only, or its schema is behind or ahead of this program."""


class NoDatabaseError(UserError, StoreError):
    """No database is where it was said to be: no such folder or file, or a file that is none.

    Exit code 2, unlike that of a database that was there and fails.
    """


class ConflictError(StoreError):
    """The database ended a transaction in favour of another one; the same again may well do."""


class ResourceError(MonitorError):
    """Not enough memory or disk for the run; the message gives the estimate and what is free."""


class WorkersLostError(MonitorError):
    """The processes that measured a run's batches died; `unit` is what the last one was at."""

    def __init__(self, message: str, unit: int | None = None) -> None:
        super().__init__(message)
        self.unit = unit


class LeaseLostError(MonitorError):
    """A run that is no longer held by the worker that speaks for it: it stops and drops all."""


class RunStoppedError(MonitorError):
    """A run that was told to stop. `reason_code` is `user` (cancelled) or `deadline`."""

    def __init__(self, message: str, reason_code: str) -> None:
        super().__init__(message)
        self.reason_code = reason_code
