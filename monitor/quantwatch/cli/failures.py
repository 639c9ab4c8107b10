"""How errors end: one line on stderr, the exit code of the class, a traceback only with --debug."""

import contextlib
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from quantwatch.cli.session import Session
from quantwatch.cli.streams import say, whisper
from quantwatch.errors import ConfigError, QuantwatchError, ResourceError, StoreError, UserError
from quantwatch.telemetry import disk_is_full

INTERRUPTED = 130
_INTERNAL = 3


class Guarded(TyperGroup):
    """The root group: no exception of a command leaves it but exits and usage errors."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; turn what it raises into a line and an exit code."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException):
            raise
        # The last line of defence: whatever it is, it is shown and has an exit code.
        except (Exception, KeyboardInterrupt) as error:
            session = ctx.obj or Session()
            if session.debug:
                traceback.print_exception(error)
            line, code = describe(error)
            line = session.addressed(line) if isinstance(error, StoreError) else line
            raise typer.Exit(answer(line, code, json=session.json)) from error


def exit_code(app: typer.Typer, words: list[str]) -> int:
    """Run the command line that was typed and return its exit code. Raises SystemExit only."""
    json = "--json" in words
    if foreign := [word for word in words if not _is_text(word)]:
        return answer(f"not UTF-8 text: {foreign[0]!a}", UserError.exit_code, json=json)
    try:
        return app(args=words, prog_name="quantwatch", standalone_mode=False) or 0
    except typer.TyperException as error:
        return usage_error(error, json=json)
    # Outside of any command: --help on a full disk, Ctrl-C while options are read.
    except (Exception, KeyboardInterrupt) as error:
        raise SystemExit(answer(*describe(error), json=json)) from error


def _is_text(word: str) -> bool:
    """Say whether a word can be stored and printed; bytes of another encoding can't."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe(error: BaseException) -> tuple[str, int]:
    """Return what to say of an error, and its exit code. A ConfigError may list several lines."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, ConfigError):
        return printable(str(error), keep="\n"), error.exit_code
    if isinstance(error, QuantwatchError):
        return printable(str(error)), error.exit_code
    message = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"out of memory: {message or 'the run needs more than is free'}", _INTERNAL
    if disk_is_full(error):
        return f"disk full: {message}", _INTERNAL
    hint = "run with --debug for the traceback"
    return f"internal: {type(error).__name__}: {message} ({hint})", _INTERNAL


def printable(text: str, keep: str = "") -> str:
    """Return text whose line ends and control characters, a file name's perhaps, are escaped."""
    return "".join(
        char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text
    )


def usage_error(error: typer.TyperException, *, json: bool) -> int:
    """Say what is wrong with the words typed, in one line that names the help."""
    # Choices are read by pydantic, whose prefix says nothing.
    message = error.format_message().replace("Value error, ", "")
    if message.startswith("Usage:"):
        # A group without a command: its help is the answer.
        whisper(message)
        return error.exit_code
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "quantwatch"
    return answer(f"{' '.join(message.split())} (try: {path} --help)", error.exit_code, json=json)


def answer(line: str, code: int, *, json: bool) -> int:
    """Write the line to stderr (with --json the one document to stdout, too); return the code."""
    whisper(line if code == INTERRUPTED else f"error: {line}")
    if json:
        from quantwatch.domain import RunStatus
        from quantwatch.report.document import dumps, failure_document

        status = RunStatus.CANCELLED if code == INTERRUPTED else RunStatus.FAILED
        # A document nobody can be given changes nothing about the error.
        with contextlib.suppress(ResourceError):
            say(dumps(failure_document(status, line)))
    return code
