"""Which of the last judged runs breached, for rules on m of n: the bits of one number.

The newest run is the lowest bit. One bit more than n is kept, so that the newest can be taken back.
"""


def pushed(window: int, n: int, *, breached: bool) -> int:
    """Return the window after one more judged run."""
    return (window << 1 | breached) & _ones(n + 1)


def num_breaches(window: int, n: int) -> int:
    """Return how many of the last n judged runs breached."""
    return (window & _ones(n)).bit_count()


def without_newest(window: int) -> int:
    """Return the window as it was before its newest run."""
    return window >> 1


def _ones(count: int) -> int:
    return (1 << count) - 1
