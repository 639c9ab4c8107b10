"""Time zones: found by IANA name, renamed ones mapped, and the instants at which they change."""

import difflib
import zoneinfo
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

RENAMED = {
    "America/Buenos_Aires": "America/Argentina/Buenos_Aires",
    "America/Godthab": "America/Nuuk",
    "America/Indianapolis": "America/Indiana/Indianapolis",
    "America/Louisville": "America/Kentucky/Louisville",
    "Asia/Calcutta": "Asia/Kolkata",
    "Asia/Dacca": "Asia/Dhaka",
    "Asia/Katmandu": "Asia/Kathmandu",
    "Asia/Macao": "Asia/Macau",
    "Asia/Rangoon": "Asia/Yangon",
    "Asia/Saigon": "Asia/Ho_Chi_Minh",
    "Asia/Thimbu": "Asia/Thimphu",
    "Asia/Ulan_Bator": "Asia/Ulaanbaatar",
    "Atlantic/Faeroe": "Atlantic/Faroe",
    "Europe/Kiev": "Europe/Kyiv",
    "Pacific/Enderbury": "Pacific/Kanton",
    "Pacific/Ponape": "Pacific/Pohnpei",
    "Pacific/Truk": "Pacific/Chuuk",
}
"""Old names that a zone database may have dropped."""
_NOT_ZONES = ("right/", "posix/", "posixrules", "localtime", "Factory")
"""Files in the same folder: other time scales, or whatever this host is set to."""
_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)


def parse_zone(name: str) -> str:
    """Return the IANA name of a zone as it is called today.

    Raises ValueError naming the value and what is allowed.
    """
    current = RENAMED.get(name, name)
    try:
        if current.startswith(_NOT_ZONES):
            raise ValueError(current)
        ZoneInfo(current)
    # A folder of zones, or a name that is no path: each Python says it in another way.
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise ValueError(f"{name!r} is no time zone; {_hint(name)}") from None
    return current


def offset(zone: ZoneInfo, instant: datetime) -> timedelta:
    """Return how far the wall clock is ahead of UTC at an instant."""
    found = instant.astimezone(zone).utcoffset()
    assert found is not None
    return found


def next_change(zone: ZoneInfo, start: datetime, end: datetime) -> datetime | None:
    """Return the first instant after `start`, up to `end`, with another offset, if there is one.

    Two changes that undo each other within a day would be overlooked; no zone has had such.
    """
    before, low = offset(zone, start), start
    while low < end:
        high = min(low + _DAY, end)
        if offset(zone, high) != before:
            return _first_with_another(zone, before, low, high)
        low = high
    return None


def _first_with_another(
    zone: ZoneInfo, before: timedelta, low: datetime, high: datetime
) -> datetime:
    """Halve the time between an instant with the offset and one without, down to the second."""
    low = low.astimezone(UTC).replace(microsecond=0)
    while high - low > _SECOND:
        middle = low + (high - low) // (2 * _SECOND) * _SECOND
        low, high = (middle, high) if offset(zone, middle) == before else (low, middle)
    return high


def _hint(name: str) -> str:
    known = {zone.casefold(): zone for zone in zoneinfo.available_timezones() - {"localtime"}}
    close = difflib.get_close_matches(name.casefold(), known, n=1)
    meant = "".join(f"did you mean {known[zone]}? " for zone in close)
    return f"{meant}allowed: IANA names, e.g. UTC, Europe/Berlin"
