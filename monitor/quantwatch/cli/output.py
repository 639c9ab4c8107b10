"""How a result leaves a command: a table or one document on stdout, reports in files."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantwatch.cli.streams import say, whisper
from quantwatch.errors import UserError
from quantwatch.telemetry import check_writable, write_whole

if TYPE_CHECKING:
    from quantwatch.cli.options import Format
    from quantwatch.domain import RunResult

_SUFFIXES: "dict[str, Format]" = {
    ".md": "md",
    ".html": "html",
    ".htm": "html",
    ".xml": "junit",
    ".json": "json",
}


class Delivery:
    """Where a result goes, checked before the run: a typing error must not cost an hour."""

    def __init__(self, *, json: bool, shown: "Format | None", files: list[Path] | None) -> None:
        if json and shown not in (None, "json") and not files:
            raise UserError(f"--json and --format {shown} both want stdout; add --output FILE")
        self._files = [(path, format_of(path, shown)) for path in files or []]
        self._shown: Format | None = "json" if json else None if files else shown

    def write(self, result: "RunResult") -> None:
        """Write the files."""
        for path, wanted in self._files:
            write_whole(path, rendered(result, wanted))
            whisper(f"wrote {path}")

    def deliver(self, result: "RunResult") -> None:
        """Write the files, then stdout: a document, or the table."""
        self.write(result)
        if self._shown is not None:
            say(rendered(result, self._shown))
        else:
            from quantwatch.report.table import renderable

            show(renderable(result))


def format_of(path: Path, given: "Format | None") -> "Format":
    """Return the format of a file: the given one, else by suffix. Checks that it can be written."""
    if not path.absolute().parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.absolute().parent}")
    if given is None and path.suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise UserError(f"--output {path}: can't tell the format by its suffix ({known})")
    if given is not None and _SUFFIXES.get(path.suffix, given) != given:
        whisper(f"note: {path} gets {given}, as --format says, whatever its suffix promises")
    check_writable(path)
    return given or _SUFFIXES[path.suffix]


def rendered(result: "RunResult", wanted: "Format") -> str:
    """Return a result as text in one of the report formats."""
    from quantwatch.report import document, html, junit, markdown

    renderers: dict[Format, Callable[[RunResult], str]] = {
        "md": markdown.render,
        "html": html.render,
        "junit": junit.render,
        "json": document.render,
    }
    return renderers[wanted](result)


def show(renderable: Any) -> None:
    """Print something `rich` can draw; as plain text when stdout is no terminal."""
    from rich.console import Console

    # Only measured: `rich` exits with 1, a regression, when what it writes to is gone.
    terminal = Console()
    drawn = io.StringIO()
    Console(
        file=drawn,
        force_terminal=terminal.is_terminal,
        width=terminal.width if terminal.is_terminal else 160,
        no_color=terminal.no_color or not terminal.is_terminal,
    ).print(renderable)
    say(drawn.getvalue())


def show_json(data: Any) -> None:
    """Print data as one strict JSON document."""
    from quantwatch.report.document import dumps

    say(dumps(data))


def table(names: list[str], rows: list[list[str]]) -> Any:
    """Return a plain table of texts; nothing in them is markup."""
    from rich.table import Table

    from quantwatch.report.table import plain

    drawn = Table(box=None, pad_edge=False)
    for name in names:
        drawn.add_column(name, overflow="fold")
    for row in rows:
        drawn.add_row(*map(plain, row))
    return drawn
