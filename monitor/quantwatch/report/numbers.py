"""Numbers as reports show them: a value, or the reason why there is none; and harmless text."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from quantwatch.domain import Measurement

_SIGNS = {"nan": "NaN", "posinf": "+∞", "neginf": "−∞", "missing": "–", "inconclusive": "–"}
# XML 1.0 allows no other control characters, no surrogates, not U+FFFE and U+FFFF.
_UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Z95 = 1.96
"""Half width of a 95 % interval in standard errors."""


def plural(number: int, word: str, words: str = "") -> str:
    """Return a number and what it counts: ``1 run``, ``2 runs``, ``1,200 families``."""
    return f"{number:,} {word if number == 1 else words or f'{word}s'}"


class Number(NamedTuple):
    """A finite value, or None with its kind: nan, posinf, neginf, or missing (not measured)."""

    value: float | None
    kind: str = "finite"

    @classmethod
    def of(cls, value: float | None) -> "Number":
        """Classify a plain float; None is missing."""
        if value is None:
            return MISSING
        if math.isfinite(value):
            return cls(value)
        return cls(None, "nan" if math.isnan(value) else "posinf" if value > 0 else "neginf")

    def exp(self) -> "Number":
        """Return e to this power, +∞ beyond the range of float64."""
        if self.value is None:
            return Number(0.0) if self.kind == "neginf" else self
        try:
            return Number(math.exp(self.value))
        except OverflowError:
            return Number(None, "posinf")

    def text(self, digits: int = 3) -> str:
        """Return the number for people: significant digits, or NaN, +∞, −∞, – (not measured)."""
        if self.value is None:
            return _SIGNS[self.kind]
        return f"{self.value:.{digits}g}"


MISSING = Number(None, "missing")


def statistic(row: Measurement | None, name: str = "mean") -> Number:
    """Return one statistic; when no finite value is left, the kind says what was there."""
    if row is None:
        return MISSING
    value: float | None = getattr(row, name)
    if value is not None:
        return Number.of(value)
    if row.mean is not None:
        return MISSING
    return Number(None, _kind(row))


def _kind(row: Measurement) -> str:
    """Name what a mean over only non-finite values is: +∞ and −∞ together have none."""
    if row.n_nan or (row.n_posinf and row.n_neginf):
        return "nan"
    if row.n_posinf or row.n_neginf:
        return "posinf" if row.n_posinf else "neginf"
    return "missing"


def printable(text: str) -> str:
    """Return text without control characters: XML forbids them, a terminal would obey them."""
    return _UNPRINTABLE.sub("\ufffd", text)


def as_fields(numbers: Mapping[str, Number]) -> dict[str, Any]:
    """Write numbers as JSON: a finite one bare, any other as null beside its kind."""
    fields: dict[str, Any] = {}
    for name, number in numbers.items():
        fields[name] = number.value
        if number.value is None:
            fields[f"{name}_kind"] = number.kind
    return fields
