"""When a message is tried again: a fixed plan, spread by chance, stretched by recent failures."""

PLAN_S = (5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 36000.0)
"""Waits after the first attempt, which is made at once, and after each further one."""
MOST_ATTEMPTS = len(PLAN_S) + 1
JITTER = 0.2
LONGEST_S = max(PLAN_S) * (1 + JITTER) * 2
"""No message waits longer than that for its next attempt."""
MEMORY = 0.2
"""Weight of the newest attempt in the moving average."""


def planned_s(attempt: int) -> float:
    """Return the plan's wait after an attempt (1 is the first); the last one repeats."""
    if attempt < 1:
        raise ValueError(f"attempt {attempt}: the first one is 1")
    return PLAN_S[min(attempt, len(PLAN_S)) - 1]


def wait_s(
    attempt: int, *, failure_ratio: float, chance: float, retry_after_s: float | None
) -> float:
    """Return how many seconds to wait after a failed attempt.

    `chance` in [0, 1) spreads the plan by ±20 %. `failure_ratio` (0 healthy … 1 down, before this
    attempt) stretches it up to twice; so a wait is 0.8 to 2.4 times the plan. A receiver that says
    Retry-After is followed between the plan and twice the plan.
    """
    planned = planned_s(attempt)
    if retry_after_s is not None:
        return min(max(retry_after_s, planned), 2 * planned)
    return planned * (1 + JITTER * (2 * chance - 1)) * (1 + failure_ratio)


def next_ratio(failure_ratio: float, *, failed: bool) -> float:
    """Return the moving average of failures after one more attempt: 0.8 × old + 0.2 × new."""
    return (1 - MEMORY) * failure_ratio + (MEMORY if failed else 0.0)
