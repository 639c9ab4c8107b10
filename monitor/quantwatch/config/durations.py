"""Lengths of time as people write them: 90s, 10m, 6h, 1h30m, 1d, 2w."""

import re
from typing import Annotated

from pydantic import AfterValidator

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_PART = re.compile(r"(\d+)([smhdw])")
_MOST = 10 * 366 * 86400


def seconds(text: str) -> int:
    """Return the seconds of a length of time.

    Raises ValueError naming the text and what is allowed: a number alone has no unit.
    """
    if not re.fullmatch(rf"({_PART.pattern})+", text):
        raise ValueError(f"{text!r} is no length of time; allowed: 90s, 10m, 6h, 1h30m, 1d, 2w")
    total = sum(int(count) * _UNITS[unit] for count, unit in _PART.findall(text))
    if total > _MOST:
        raise ValueError(f"{text!r} is longer than ten years")
    return total


def _checked(text: str) -> str:
    seconds(text)
    return text


def _positive(text: str) -> str:
    if seconds(text) == 0:
        raise ValueError(f"{text!r} is not allowed; it must be longer than nothing")
    return text


Duration = Annotated[str, AfterValidator(_checked)]
"""Kept as it is written; `seconds` reads it."""
PositiveDuration = Annotated[str, AfterValidator(_positive)]
