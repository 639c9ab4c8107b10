"""How many runs have to breach before a rule fires: in a row, or m of the last n."""

from typing import Annotated, Any

from pydantic import BeforeValidator

MOST_RUNS = 30
"""More nights than anybody waits for."""


def _checked(given: Any) -> Any:
    """Return the pair as a tuple. Raises ValueError on anything else than 1 ≤ m ≤ n ≤ 30."""
    if given is None:
        return None
    whole = isinstance(given, list | tuple) and all(type(each) is int for each in given)
    if not whole or len(given) != 2 or not 1 <= given[0] <= given[1] <= MOST_RUNS:
        raise ValueError(
            f"{_shown(given)} is not allowed; allowed: two whole numbers [m, n] with "
            f"1 ≤ m ≤ n ≤ {MOST_RUNS}, e.g. [2, 5]: two of the last five runs"
        )
    return tuple(given)


def _shown(given: Any) -> str:
    return str(list(given)) if isinstance(given, list | tuple) else repr(given)


MOfN = Annotated[tuple[int, int], BeforeValidator(_checked)]
"""[m, n]: m breaches among the last n judged runs."""


def counts_problem(enter_runs: int, m_of_n: tuple[int, int] | None) -> str | None:
    """Return why two ways to count exclude each other, None when only one is used."""
    if m_of_n is None or enter_runs == 1:
        return None
    return (
        f"enter_runs = {enter_runs} (in a row) and m_of_n = {list(m_of_n)} exclude each other; "
        "give one of them"
    )
