"""How a Hadamard order is split for two products, and which orders are too wide for that."""

__all__ = ["LARGEST_FACTOR", "hadamard_why_not", "split_order"]

LARGEST_FACTOR = 128
"""Wider factors don't fit a program's registers."""
_DOT = 16


def split_order(order: int, base: int) -> tuple[int, int]:
    """Return (P, Q): P a power of two for Sylvester, Q = base · 2^j the rest, both near √order."""
    left, right = order // base, base
    while left > 1 and (right < _DOT or left > LARGEST_FACTOR):
        left, right = left // 2, right * 2
    return left, right


def hadamard_why_not(order: int, base: int) -> str | None:
    """Say why a rotation of this order is too wide for one program, None when it isn't."""
    largest = max(split_order(order, base))
    if largest > LARGEST_FACTOR:
        return f"order {order} needs a factor of {largest}; at most {LARGEST_FACTOR} fit a program"
    return None
