"""The columns of a measurement, and how a statistic that is not finite is read back."""

from collections.abc import Mapping

from quantwatch.errors import UserError
from quantwatch.store.kinds import FINITE, MISSING

COUNTS = ("n", "n_nan", "n_posinf", "n_neginf", "n_missing")
STATISTICS = ("mean", "std", "se", "min", "p50", "p90", "p95", "p99", "p999", "max")


def require_statistic(name: str) -> str:
    """Return the name; raises UserError unless it is a statistic of a measurement."""
    if name not in STATISTICS:
        raise UserError(f"Statistic {name!r} is none of {', '.join(STATISTICS)}.")
    return name


def statistic_kind(value: float | None, kind: str | None, counts: Mapping[str, int | None]) -> str:
    """Return why a statistic has no value: its own kind, or that of the values it was taken over.

    A mean over infinite values only is None (nothing finite is left) and shown as `posinf`.
    """
    if value is not None:
        return FINITE
    if kind is not None:
        return kind
    special = (("n_nan", "nan"), ("n_posinf", "posinf"), ("n_neginf", "neginf"))
    return next((name for column, name in special if counts.get(column)), MISSING)
