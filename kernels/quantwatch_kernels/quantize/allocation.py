"""Which format each matrix gets when all of them together may take so many bytes.

Minimise Σ cost over one option per item, subject to Σ bytes ≤ budget: the multiple-choice knapsack,
solved by dynamic programming over bytes. Costs are what quantizing an item *alone* costs (KL in
nats, from `sensitivity`); that they add up is an assumption, which only measuring the whole result
can check.

Bytes are counted in cells of `cell_bytes`, an option's bytes beyond its item's smallest rounded up
to whole cells, so that a budget is never exceeded. The cell is the largest that divides every such
difference, and the answer is then exact; only if that would take more than 2¹⁷ cells are they made
wider. What the rounding leaves is spent on the upgrades that still fit, best saving per byte first.

Ties take the option that comes first. Nothing is random.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Allocation", "Item", "Option", "allocate", "allocate_randomly", "allocate_uniformly"]

_MAX_CELLS = 1 << 17


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store an item: a name, its bytes and what it costs."""

    name: str
    num_bytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class Item:
    """Something that is stored in one of several ways. Raises ValueError for impossible ones."""

    name: str
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        if not self.options:
            raise ValueError(f"{self.name}: there must be at least one option; there is none.")
        for option in self.options:
            if option.num_bytes < 0:
                raise ValueError(
                    f"{self.name}: {option.name} takes {option.num_bytes} bytes; 0 is the least."
                )
            if not math.isfinite(option.cost):
                raise ValueError(
                    f"{self.name}: the cost of {option.name} is {option.cost}; it must be finite."
                )

    @property
    def smallest(self) -> int:
        """Bytes of its smallest option."""
        return min(option.num_bytes for option in self.options)


@dataclass(frozen=True, slots=True)
class Allocation:
    """The option of each item, in the order of the items."""

    options: tuple[Option, ...]
    cell_bytes: int
    """Resolution of the solver; optimal to the byte if it divides all differences of sizes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all chosen options."""
        return sum(option.num_bytes for option in self.options)

    @property
    def cost(self) -> float:
        """Σ of their costs."""
        return math.fsum(option.cost for option in self.options)


def allocate(
    items: Sequence[Item], budget_bytes: int, *, max_cells: int = _MAX_CELLS
) -> Allocation:
    """Return the cheapest choice that takes at most `budget_bytes`.

    Raises ValueError when even the smallest options don't fit, naming what they take.
    """
    if max_cells < 1:
        raise ValueError(f"max_cells must be at least 1; it is {max_cells}.")
    least = [min(item.options, key=lambda option: option.num_bytes) for item in items]
    _check_fits(least, budget_bytes)
    spare = budget_bytes - sum(option.num_bytes for option in least)
    extra = [[option.num_bytes - item.smallest for option in item.options] for item in items]
    # More than what the largest options take is never spent.
    spare = min(spare, sum(max(sizes) for sizes in extra))
    cell = _cell(extra, spare, max_cells)
    cells = [[-(-size // cell) for size in sizes] for sizes in extra]
    chosen = _solve(items, cells, spare // cell)
    left = spare - sum(sizes[k] for sizes, k in zip(extra, chosen, strict=True))
    _spend(items, chosen, left)
    options = tuple(item.options[k] for item, k in zip(items, chosen, strict=True))
    return Allocation(options, cell)


def _cell(extra: Sequence[Sequence[int]], spare: int, max_cells: int) -> int:
    exact = math.gcd(*(size for sizes in extra for size in sizes)) or 1
    return exact * max(1, -(-spare // (exact * max_cells)))


def _solve(items: Sequence[Item], cells: Sequence[Sequence[int]], room: int) -> list[int]:
    """Return the index of each item's option; best[c] is the least cost with at most c cells."""
    best = np.zeros(room + 1)
    picks = []
    for item, sizes in zip(items, cells, strict=True):
        reached = np.full(room + 1, np.inf)
        pick = np.zeros(room + 1, dtype=np.int16)
        for k, (option, size) in enumerate(zip(item.options, sizes, strict=True)):
            if size > room:
                continue
            cost = best[: room + 1 - size] + option.cost
            better = cost < reached[size:]
            reached[size:][better] = cost[better]
            pick[size:][better] = k
        best = reached
        picks.append(pick)
    chosen: list[int] = []
    for sizes, pick in zip(reversed(cells), reversed(picks), strict=True):
        chosen.append(int(pick[room]))
        room -= sizes[chosen[-1]]
    return chosen[::-1]


def _spend(items: Sequence[Item], chosen: list[int], left: int) -> None:
    """Change `chosen` by single swaps that cost less and still fit, until there are none."""
    while True:
        swaps = []
        for number, item in enumerate(items):
            now = item.options[chosen[number]]
            for k, option in enumerate(item.options):
                more, saved = option.num_bytes - now.num_bytes, now.cost - option.cost
                if saved > 0 and more <= left:
                    swaps.append((saved / max(more, 1), number, k, more))
        if not swaps:
            return
        # Of equal ones the first item's: max() keeps the first it meets.
        _, number, k, more = max(swaps, key=lambda swap: swap[0])
        chosen[number] = k
        left -= more


def allocate_uniformly(items: Sequence[Item], budget_bytes: int) -> Allocation:
    """Return the largest size that all items can have, the rest spent from the first item on.

    What to compare with: options are taken in order of their bytes, whatever they cost. Raises
    ValueError as `allocate` does.
    """
    ordered = [sorted(item.options, key=lambda option: option.num_bytes) for item in items]
    rank, chosen = 0, [options[0] for options in ordered]
    _check_fits(chosen, budget_bytes)
    while True:
        higher = [options[min(rank + 1, len(options) - 1)] for options in ordered]
        if higher == chosen or sum(option.num_bytes for option in higher) > budget_bytes:
            break
        rank, chosen = rank + 1, higher
    return _upgraded(ordered, chosen, budget_bytes, range(len(items)))


def allocate_randomly(items: Sequence[Item], budget_bytes: int, seed: int) -> Allocation:
    """Return the smallest options, then one step up for random items for as long as any fits.

    What to compare with. Raises ValueError as `allocate` does.
    """
    ordered = [sorted(item.options, key=lambda option: option.num_bytes) for item in items]
    chosen = [options[0] for options in ordered]
    _check_fits(chosen, budget_bytes)
    generator = np.random.default_rng(seed)
    while True:
        before = chosen
        for number in generator.permutation(len(items)).tolist():
            chosen = list(_upgraded(ordered, chosen, budget_bytes, [number]).options)
        if chosen == before:
            return Allocation(tuple(chosen), 1)


def _check_fits(chosen: Sequence[Option], budget_bytes: int) -> None:
    smallest = sum(option.num_bytes for option in chosen)
    if smallest > budget_bytes:
        raise ValueError(
            f"{budget_bytes} bytes are not enough: the smallest options take {smallest} bytes."
        )


def _upgraded(
    ordered: Sequence[Sequence[Option]],
    chosen: Sequence[Option],
    budget_bytes: int,
    numbers: Iterable[int],
) -> Allocation:
    """Take these items one step up, in turn, where it fits."""
    result = list(chosen)
    left = budget_bytes - sum(option.num_bytes for option in chosen)
    for number in numbers:
        options, now = ordered[number], result[number]
        step = options[min(options.index(now) + 1, len(options) - 1)]
        if step.num_bytes - now.num_bytes <= left:
            left -= step.num_bytes - now.num_bytes
            result[number] = step
    return Allocation(tuple(result), 1)
