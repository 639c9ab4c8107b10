"""Structured logs: a sentence, its facts, the run and the trace it belongs to, never a secret.

`log = logs.get(__name__)`, then `log.info("run claimed", run=run_id, attempt=2)`. Records are
scrubbed before any handler sees them; those of other libraries when they are written.
"""

import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from quantwatch.errors import UserError
from quantwatch.observability.redaction import scrub, scrubbed

VARIABLE = "QUANTWATCH_LOG"
QUIET = logging.NOTSET
"""Only warnings and worse, like any library."""
Form = Literal["json", "text"]
_OURS = "quantwatch"
_FACTS = "quantwatch_facts"
_bound: ContextVar[dict[str, Any] | None] = ContextVar("quantwatch_bound", default=None)


class Log:
    """A logger of sentences with facts. Facts are plain data; None is left out."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, text: str, **facts: Any) -> None:
        """Tell what only a developer wants to know."""
        self._write(logging.DEBUG, text, facts)

    def info(self, text: str, **facts: Any) -> None:
        """Tell what happened as it should."""
        self._write(logging.INFO, text, facts)

    def warning(self, text: str, **facts: Any) -> None:
        """Tell what went wrong and is dealt with."""
        self._write(logging.WARNING, text, facts)

    def error(self, text: str, error: BaseException | None = None, **facts: Any) -> None:
        """Tell what went wrong and needs somebody, with the exception that says how."""
        self._write(logging.ERROR, text, facts, error)

    def _write(
        self, level: int, text: str, facts: Mapping[str, Any], error: BaseException | None = None
    ) -> None:
        if not self._logger.isEnabledFor(level):
            return
        told = scrubbed({k: v for k, v in (context() | dict(facts)).items() if v is not None})
        if error is not None:
            told["error"] = scrub(f"{type(error).__name__}: {error}")
            told["traceback"] = scrub("".join(traceback.format_exception(error)))
        # The sentence never is a format: a % in it is a %.
        self._logger.log(level, "%s", scrub(text), extra={_FACTS: told}, stacklevel=3)


def get(name: str) -> Log:
    """Return the logger of a module."""
    return Log(name)


def context() -> dict[str, Any]:
    """Return the facts that every record of this thread of work carries, e.g. run and trace."""
    return dict(_bound.get() or {})


@contextmanager
def bound(**facts: Any) -> Iterator[None]:
    """Add facts to every record in the body. A new thread begins with none."""
    token = _bound.set(context() | facts)
    try:
        yield
    finally:
        _bound.reset(token)


def wanted_form(default: Form, env: Mapping[str, str] = os.environ) -> Form:
    """Return how records are written. Raises UserError on another QUANTWATCH_LOG."""
    chosen = env.get(VARIABLE) or default
    if chosen == "json":
        return "json"
    if chosen == "text":
        return "text"
    raise UserError(f"{VARIABLE}: {chosen!r} is not allowed; allowed: json, text")


def configure(form: Form, *, everything: bool, level: int = logging.INFO) -> None:
    """Write records to stderr from now on; repeating it replaces what was before.

    `everything` takes in other libraries, from warnings on: for the service. Otherwise only our
    own records are written.
    """
    root, ours = logging.getLogger(), logging.getLogger(_OURS)
    for logger in (root, ours):
        for handler in [each for each in logger.handlers if isinstance(each, _Stderr)]:
            logger.removeHandler(handler)
    handler = _Stderr()
    handler.setFormatter(JsonLines() if form == "json" else Readable())
    ours.setLevel(level)
    (root if everything else ours).addHandler(handler)


class JsonLines(logging.Formatter):
    """One strict JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON; a fact never replaces time, level, logger or text."""
        frame, facts = _frame(record), _facts(record)
        document = frame | {f"{k}_" if k in frame else k: v for k, v in facts.items()}
        text = json.dumps(_strict(document), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8", "backslashreplace").decode()


class Readable(logging.Formatter):
    """One line per record for people; a traceback follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level, logger, sentence, facts."""
        facts, frame = _facts(record), _frame(record)
        trail = facts.pop("traceback", "")
        told = ", ".join(f"{key}={value}" for key, value in facts.items())
        line = f"{frame['at']} {frame['level']:<7} {frame['logger']}: {frame['text']}"
        line = f"{line} ({told})" if told else line
        # A line end inside a fact would forge a record.
        line = line.replace("\r", "\\r").replace("\n", "\\n")
        return f"{line}\n{trail.rstrip()}" if trail else line


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is at that moment."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _frame(record: logging.LogRecord) -> dict[str, Any]:
    moment = datetime.fromtimestamp(record.created, UTC)
    return {
        "at": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "text": scrub(record.getMessage()),
    }


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] | None = getattr(record, _FACTS, None)
    if facts is not None:
        return dict(facts)
    if record.exc_info is None or record.exc_info[1] is None:
        return {}
    error = record.exc_info[1]
    return {
        "error": scrub(f"{type(error).__name__}: {error}"),
        "traceback": scrub("".join(traceback.format_exception(error))),
    }


def _strict(value: Any) -> Any:
    """Return the value with NaN and infinities as text, which JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list) else value
