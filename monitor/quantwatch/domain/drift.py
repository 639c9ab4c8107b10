"""What changed since a baseline, in words. Records have name, part, value and baseline."""

from collections.abc import Iterable, Sequence
from typing import Any

from quantwatch.domain.words import Json

ABSENT = "absent"
"""Stands for a value that only one of the runs has."""
_MOVED = ("reference", "measured")
_MOST_NAMED = 4
_SHA_LETTERS = 40
_SHORT, _LINE = 12, 60


def changed(differences: Iterable[Json]) -> list[Json]:
    """Return the records of what else changed; records of numbers have no name."""
    return [record for record in differences if "name" in record]


def baseline_moved(records: Iterable[Json]) -> bool:
    """Say whether the reference, or what is measured of it, is another: no regression then."""
    return any(record.get("part") in _MOVED for record in records)


def headline(records: Sequence[Json]) -> str:
    """Return what changed in one line, "" when nothing did; a reference that moved comes first."""
    if not records:
        return ""
    moved = [record for record in records if record.get("part") in _MOVED]
    told = [*moved, *(record for record in records if record not in moved)]
    named = "; ".join(_sentence(record) for record in told[:_MOST_NAMED])
    more = f"; {len(told) - _MOST_NAMED} more" if len(told) > _MOST_NAMED else ""
    return f"{'baseline moved' if moved else 'changed since the baseline'}: {named}{more}"


def _sentence(record: Json) -> str:
    name = str(record["name"]).removeprefix("environment.")
    return f"{name} {_short(record['baseline'])} → {_short(record['value'])}"


def _short(value: Any) -> str:
    """Return a value that fits a line: the start of a digest, a dash for none."""
    text = "–" if value in (None, "") else str(value)
    is_digest = len(text) >= _SHA_LETTERS and set(text) <= set("0123456789abcdef")
    return text[:_SHORT] if is_digest else text[:_LINE]
