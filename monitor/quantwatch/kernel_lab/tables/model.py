"""A table as a value: what is asked for, what comes back, and how it is written down.

Cells hold numbers, not texts: JSON gets them as they are, Markdown gets them in the column's
format. A number that isn't finite is written as a word (JSON has none for it).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Cell = str | int | float | bool | None


def _silent(_line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class TableRequest:
    """What a table is made of. Threads are pinned by the caller."""

    cache_dir: Path
    model: str = "smollm2-135m"
    text: Path | None = None
    """A text file; None: core-v1."""
    windows: int | None = 8
    """Windows of the text that are measured; None: all. core-v1 has its own number."""
    seed: int = 0
    """Of the rescale that takes the model off its grid, and of whatever else is drawn."""
    quick: bool = False
    """A smaller table whose figures are still right: fewer rows, repeats or windows."""
    tell: Callable[[str], None] = field(default=_silent)
    """Takes a line of progress."""
    tasks: Path | None = None
    """A file of multiple-choice items, for tables that measure some; None: choices-v1."""


@dataclass(frozen=True, slots=True)
class Column:
    """A name in JSON, a heading with its unit, and how numbers are written ('.4f')."""

    name: str
    heading: str
    form: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells in the order of the columns; notes say how it was measured."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a row of another length."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(row)} cells for {len(self.columns)} columns")


class Rows(list[tuple[Cell, ...]]):
    """Rows as they are measured. Each is told as one line: a killed table isn't an hour lost."""

    def __init__(self, columns: Sequence[Column], tell: Callable[[str], None]) -> None:
        super().__init__()
        self._columns, self._tell = columns, tell

    def add(self, *row: Cell) -> None:
        """Keep a row and tell it."""
        self.append(row)
        cells = zip(self._columns, row, strict=True)
        self._tell(
            "; ".join(f"{column.heading} {text(cell, column.form)}" for column, cell in cells)
        )


def to_json(table: Table) -> dict[str, Any]:
    """Return a table as strict JSON data."""
    names = [column.name for column in table.columns]
    return {
        "title": table.title,
        "columns": [{"name": column.name, "heading": column.heading} for column in table.columns],
        "rows": [dict(zip(names, map(_plain, row), strict=True)) for row in table.rows],
        "notes": list(table.notes),
    }


def _plain(cell: Cell) -> Cell:
    return _word(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell


def _word(value: float) -> str:
    return "not finite" if math.isnan(value) else "∞" if value > 0 else "-∞"


def to_markdown(table: Table) -> str:
    """Return a table as Markdown: title, aligned columns, notes."""
    heads = [column.heading for column in table.columns]
    body = [
        [text(cell, column.form) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
    numeric = [_is_numeric(table.rows, index) for index in range(len(heads))]
    rule = [
        ("-" * (width - 1) + ":") if n else "-" * width
        for width, n in zip(widths, numeric, strict=True)
    ]
    lines = [_line(cells, widths, numeric) for cells in (heads, rule, *body)]
    notes = [f"- {note}" for note in table.notes]
    return "\n".join([f"## {table.title}", "", *lines, *([""] if notes else []), *notes]) + "\n"


def text(cell: Cell, form: str = "") -> str:
    """Return a cell as people read it."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float) and not math.isfinite(cell):
        return _word(cell)
    shown = format(cell, form) if isinstance(cell, int | float) else cell
    return shown.replace("|", "\\|").replace("\n", " ")


def _is_numeric(rows: tuple[tuple[Cell, ...], ...], index: int) -> bool:
    cells = [row[index] for row in rows if row[index] is not None]
    return bool(cells) and all(isinstance(cell, int | float) for cell in cells)


def _line(cells: list[str], widths: list[int], numeric: list[bool]) -> str:
    padded = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return f"| {' | '.join(padded)} |"
