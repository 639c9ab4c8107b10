"""Column types that refuse what a database would change silently."""

import hashlib
import json
import math
import numbers
import operator
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
from sqlalchemy import BigInteger, DateTime, Dialect, Double, Text
from sqlalchemy.types import TypeDecorator

from quantwatch.store.kinds import from_kind, kind_of

_NUMBER_KEY = "$float"
_ESCAPED = re.compile(r"\$+float")


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, kept in UTC. SQLite drops zones, so naive values are refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _dialect: Dialect) -> datetime | None:
        """Convert to UTC; raises ValueError on a naive datetime."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"datetime {value.isoformat()} has no time zone; use UTC")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, _dialect: Dialect) -> datetime | None:
        """Attach UTC to what SQLite returns without a zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FiniteFloat(TypeDecorator[float]):
    """A finite float64 or NULL. NaN and infinities need a kind beside them (`kinds.py`)."""

    impl = Double
    cache_ok = True

    def process_bind_param(self, value: float | None, _dialect: Dialect) -> float | None:
        """Raise ValueError unless finite."""
        if value is None:
            return None
        if not math.isfinite(value):
            raise ValueError(f"{value} in a column for finite numbers; write NULL and a kind")
        return float(value)


class WholeNumber(TypeDecorator[int]):
    """A 64-bit integer. numpy's integers would reach SQLite as blobs, so they become `int`."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, _dialect: Dialect) -> int | None:
        """Raise TypeError unless the value is an integer."""
        return None if value is None else operator.index(value)


class Words(TypeDecorator[str]):
    """Text for people. PostgreSQL takes neither NUL nor lone surrogates: they become visible."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        """Replace NUL by \\x00 and lone surrogates by their escapes."""
        if value is None:
            return None
        return value.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


class StrictJson(TypeDecorator[Any]):
    """Strict JSON as ASCII text, the same on both databases. NaN and infinities survive.

    A non-finite float is written as ``{"$float": "nan"}``; tuples come back as lists.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, _dialect: Dialect) -> str | None:
        """Write; raises TypeError on what JSON can't hold."""
        return None if value is None else dump_json(value)

    def process_result_value(self, value: str | None, _dialect: Dialect) -> Any:
        """Read."""
        return None if value is None else load_json(value)


def dump_json(value: Any) -> str:
    """Return strict JSON in which non-finite floats are marked. Raises TypeError on other types."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


def json_sha(value: Any) -> str:
    """Return the SHA-256 of a value's JSON with sorted keys; ASCII, so any string has one."""
    text = json.dumps(plain(value), allow_nan=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load_json(text: str | bytes) -> Any:
    """Return what `dump_json` wrote, tuples as lists."""
    return json.loads(text, object_hook=_restore)


def plain(value: Any) -> Any:
    """Return a value of JSON's own types, non-finite floats marked. Raises TypeError on others."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {_NUMBER_KEY: kind_of(number)}
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} {value!r} can't be kept as JSON")


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    wrong = [key for key in value if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"key {wrong[0]!r} can't be kept as JSON: keys are strings")
    record = {str(key): plain(item) for key, item in value.items()}
    # A mapping that looks like a marked number gets one more $, which `_restore` takes away.
    if len(record) == 1 and _ESCAPED.fullmatch(next(iter(record))):
        return {f"${key}": item for key, item in record.items()}
    return record


def _restore(record: dict[str, Any]) -> Any:
    if len(record) != 1:
        return record
    key, item = next(iter(record.items()))
    if key == _NUMBER_KEY:
        return from_kind(None, item)
    return {key[1:]: item} if _ESCAPED.fullmatch(key) else record
