"""Numbers that may not be finite: a value that is NULL unless finite, and a word beside it.

SQLite turns NaN into NULL, PostgreSQL sorts it above everything, JSON knows neither NaN nor
infinity: so none of them is ever written as a number.
"""

import math

FINITE = "finite"
MISSING = "missing"
_VALUES = {"nan": math.nan, "posinf": math.inf, "neginf": -math.inf}


def kind_of(value: float | None) -> str:
    """Return `finite`, `nan`, `posinf`, `neginf`, or `missing` for None."""
    if value is None:
        return MISSING
    if math.isfinite(value):
        return FINITE
    if math.isnan(value):
        return "nan"
    return "posinf" if value > 0 else "neginf"


def finite_or_none(value: float | None) -> float | None:
    """Return the value, None when it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def from_kind(value: float | None, kind: str) -> float | None:
    """Join what `finite_or_none` and `kind_of` split. Raises ValueError on an unknown kind."""
    if kind == FINITE:
        return value
    if kind == MISSING:
        return None
    if kind not in _VALUES:
        raise ValueError(f"value kind {kind!r} is none of finite, missing, {', '.join(_VALUES)}")
    return _VALUES[kind]
