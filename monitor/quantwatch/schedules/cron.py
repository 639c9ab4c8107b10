"""Cron text: the five fields that Debian's crontab takes, and nothing that never happens."""

import re
from datetime import datetime, timedelta

from cronsim import CronSim, CronSimError

_FIELDS = {
    "minute": "0-59",
    "hour": "0-23",
    "day of month": "1-31",
    "month": "1-12 or JAN-DEC",
    "day of week": "0-7 or SUN-SAT (Sunday is 0 or 7)",
}
_TERM = r"(\*|[0-9A-Z]+-[0-9A-Z]+)(/[0-9]+)?|[0-9A-Z]+"
# cronsim knows more (L, LW, 5#2, 10/5, seconds), which no two programs read alike.
_FIELD = re.compile(rf"({_TERM})(,({_TERM}))*")
_EXTENSION = re.compile(r"[0-9]*L|LW")
_YEARS = (datetime(2025, 1, 1), datetime(2029, 1, 1))
"""Any four years hold one 29 February; fixed ones keep a text valid or not, whatever the date."""


def parse_cron(text: str) -> str:
    """Return cron text with single blanks between its five fields.

    Raises ValueError naming the text, the field and what is allowed.
    """
    fields = text.split()
    if len(fields) != len(_FIELDS):
        raise ValueError(
            f"{text!r} has {len(fields)} field{'' if len(fields) == 1 else 's'}; allowed: five "
            '(minute, hour, day of month, month, day of week; no seconds), e.g. "0 2 * * *"'
        )
    for position, name in enumerate(_FIELDS):
        if not _is_field(fields[position], position):
            raise ValueError(
                f"{fields[position]!r} in {text!r} is no {name}; allowed: {_FIELDS[name]}, "
                "lists 1,3, ranges 1-5, and * with steps */2 or 1-5/2"
            )
    if not _ever_fires(" ".join(fields)):
        raise ValueError(
            f"{text!r} doesn't fire within four years; allowed: days that exist in those months"
        )
    return " ".join(fields)


def is_wildcard(text: str) -> bool:
    """Say whether the text runs by the hour or minute, as Debian's cron defines it.

    Such a schedule follows elapsed time when the clocks change; others keep to the local day.
    """
    minute, hour = text.split()[:2]
    return minute.startswith("*") or hour.startswith("*")


def _is_field(field: str, position: int) -> bool:
    if not field.isascii() or not _FIELD.fullmatch(field.upper()):
        return False
    if any(_EXTENSION.fullmatch(term) for term in field.upper().split(",")):
        return False
    others = ["*"] * len(_FIELDS)
    others[position] = field
    try:
        CronSim(" ".join(others), _YEARS[0])
    except CronSimError:
        return False
    return True


def _ever_fires(text: str) -> bool:
    start, end = _YEARS
    try:
        return next(CronSim(text, start - timedelta(seconds=1))) < end
    except (CronSimError, StopIteration):
        return False
