"""Files that `kernels plan` reads: CSV of samples, a TOML of tiers, and texts of other tools.

Whatever is wrong in them is a UserError that names the file, the line and what is allowed.
"""

import csv
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from quantwatch.errors import UserError
from quantwatch_kernels.planning.alpha_beta import GB, GIB

_LARGEST = 256 * 2**20
_UNITS = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": GB, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


class Kind(NamedTuple):
    """What a column holds, in words and as a function that raises ValueError for other text."""

    words: str
    read: Callable[[str], Any]


def _bounded(read: Callable[[str], float], allowed: Callable[[float], bool]) -> Callable[..., Any]:
    def checked(text: str) -> float:
        value = read(text)
        if not (isfinite(value) and allowed(value)):
            raise ValueError
        return value

    return checked


WORD = Kind("a word", str)
NUMBER = Kind("a number", _bounded(float, lambda _: True))
WHOLE = Kind("a whole number of 1 or more", _bounded(int, lambda value: value >= 1))
POSITIVE = Kind("a number above 0", _bounded(float, lambda value: value > 0))
AMOUNT = Kind("a number of 0 or more", _bounded(float, lambda value: value >= 0))


@contextmanager
def naming(place: object) -> Iterator[None]:
    """Turn a ValueError of what is inside into a UserError that names the place."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error


def read_text(path: Path) -> str:
    """Return a UTF-8 text. Raises UserError if it can't be read or is larger than 256 MiB."""
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path}: larger than 256 MiB; profile fewer steps")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def read_samples(path: Path, columns: Mapping[str, Kind]) -> list[dict[str, Any]]:
    """Return the rows of a CSV with at least these columns, each cell read as its kind says."""
    reader = csv.DictReader(read_text(path).splitlines())
    if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
        raise UserError(f"{path}: no column {missing[0]!r}; it needs {', '.join(columns)}")
    rows = []
    for row in reader:
        found = {}
        for name, kind in columns.items():
            text = row[name] or ""
            try:
                found[name] = kind.read(text)
            except ValueError as error:
                line = f"{path}, line {reader.line_num}"
                said = f"{name} is {text!r}, not" if text else f"{name} is missing, it is"
                raise UserError(f"{line}: {said} {kind.words}") from error
        rows.append(found)
    if not rows:
        raise UserError(f"{path}: no samples below the header")
    return rows


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML document."""
    with naming(path):
        return tomllib.loads(read_text(path))


def size_in_bytes(text: object) -> int:
    """Return the bytes of "24 GiB" or "24 GB", which are not the same.

    Raises ValueError for a number without a unit, and for a unit that isn't one.
    """
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError(f'{text!r} is no size such as "24 GiB"; units are {", ".join(_UNITS)}')
    return round(float(match[1]) * _UNITS[match[2]])
