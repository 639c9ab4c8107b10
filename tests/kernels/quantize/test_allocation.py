"""The knapsack of formats: against trying everything, and at its edges."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.quantize.allocation import (
    Item,
    Option,
    allocate,
    allocate_randomly,
    allocate_uniformly,
)

COSTS = st.floats(0, 10, allow_nan=False)


@st.composite
def problems(draw: st.DrawFn, step: int = 1) -> tuple[list[Item], int]:
    """A few items with options of any size, and a budget that at least the smallest fit."""
    items = [
        Item(
            f"item {number}",
            tuple(
                Option(f"option {k}", step * draw(st.integers(0, 40)), draw(COSTS))
                for k in range(draw(st.integers(1, 4)))
            ),
        )
        for number in range(draw(st.integers(1, 5)))
    ]
    spare = draw(st.integers(0, 130 * step))
    return items, sum(item.smallest for item in items) + spare


def tried(items: list[Item], budget: int) -> float:
    """The least cost of all choices that fit."""
    choices = itertools.product(*(item.options for item in items))
    fitting = [c for c in choices if sum(option.num_bytes for option in c) <= budget]
    return min(math.fsum(option.cost for option in c) for c in fitting)


@given(problem=problems())
def test_against_trying_everything(problem: tuple[list[Item], int]) -> None:
    """Catches a path read back at the wrong cell, an option over the room, and a greedy answer."""
    items, budget = problem
    found = allocate(items, budget)
    assert found.num_bytes <= budget
    assert found.cost == pytest.approx(tried(items, budget), abs=1e-9)
    assert all(option in item.options for option, item in zip(found.options, items, strict=True))


@given(problem=problems(step=7), max_cells=st.integers(1, 12))
def test_coarse_cells_never_exceed_the_budget(
    problem: tuple[list[Item], int], max_cells: int
) -> None:
    """Catches sizes rounded down; and no single upgrade that would still fit is left undone."""
    items, budget = problem
    found = allocate(items, budget, max_cells=max_cells)
    assert found.num_bytes <= budget
    assert found.cost >= tried(items, budget) - 1e-9
    left = budget - found.num_bytes
    for item, chosen in zip(items, found.options, strict=True):
        for option in item.options:
            fits = option.num_bytes - chosen.num_bytes <= left
            assert not (fits and option.cost < chosen.cost)


@settings(max_examples=30)
@given(problem=problems(), more=st.integers(0, 60))
def test_more_bytes_never_cost_more(problem: tuple[list[Item], int], more: int) -> None:
    """Catches an answer that must use up its budget."""
    items, budget = problem
    assert allocate(items, budget + more).cost <= allocate(items, budget).cost + 1e-9


def test_an_option_that_is_larger_and_worse_is_never_taken() -> None:
    """Catches a solver that trusts more bits to be better."""
    item = Item("x", (Option("small", 10, 1.0), Option("large", 90, 2.0)))
    assert allocate([item], 10**9).options[0].name == "small"


def test_greedy_by_saving_per_byte_would_be_wrong() -> None:
    """Catches Lagrangian rounding: the best ratio first leaves room for nothing else."""
    items = [
        Item("a", (Option("lo", 0, 6.0), Option("hi", 6, 0.0))),
        Item("b", (Option("lo", 0, 4.5), Option("hi", 5, 0.0))),
        Item("c", (Option("lo", 0, 4.5), Option("hi", 5, 0.0))),
    ]
    found = allocate(items, 10)
    assert [option.name for option in found.options] == ["lo", "hi", "hi"]
    assert found.cost == 6.0


def test_many_items_of_real_sizes() -> None:
    """Catches a table that grows with the bytes: 211 items, 80 MB, in about a second."""
    items = [
        Item(
            f"{n}",
            tuple(
                Option(f"{b}", 576 * 1536 * b // 8 + 36 * 576 * 2, (1 + n % 7) * 4.0**-b)
                for b in range(2, 9)
            ),
        )
        for n in range(211)
    ]
    budget = sum(item.options[3].num_bytes for item in items) + 12345
    found = allocate(items, budget)
    assert found.num_bytes <= budget
    assert found.cost < sum(item.options[3].cost for item in items)


def test_bad_input() -> None:
    """Catches a budget that is exceeded silently, and NaN that would compare as cheapest."""
    item = Item("x", (Option("uint2", 10, 1.0), Option("uint3", 15, 0.5)))
    with pytest.raises(ValueError, match="19 bytes are not enough: the smallest options take 20"):
        allocate([item, item], 19)
    with pytest.raises(ValueError, match="x: there must be at least one option"):
        Item("x", ())
    with pytest.raises(ValueError, match="x: the cost of uint2 is nan"):
        Item("x", (Option("uint2", 10, math.nan),))
    with pytest.raises(ValueError, match="x: uint2 takes -1 bytes"):
        Item("x", (Option("uint2", -1, 0.0),))
    with pytest.raises(ValueError, match="max_cells must be at least 1"):
        allocate([item], 100, max_cells=0)
    assert allocate([], 0).options == ()


@given(problem=problems(), seed=st.integers(0, 5))
def test_what_it_is_compared_with(problem: tuple[list[Item], int], seed: int) -> None:
    """Catches a straw man: the others may spend the whole budget too, and never beat the optimum."""
    items, budget = problem
    best = allocate(items, budget).cost
    for other in (allocate_uniformly(items, budget), allocate_randomly(items, budget, seed)):
        assert other.num_bytes <= budget
        assert other.cost >= best - 1e-9


def test_uniform_takes_one_size_and_then_the_first_items() -> None:
    """Catches a comparison that leaves bytes unspent."""
    options = tuple(Option(f"uint{b}", 100 * b, 4.0**-b) for b in (2, 3, 4))
    items = [Item(name, options) for name in "abcd"]
    names = [option.name for option in allocate_uniformly(items, 1430).options]
    assert names == ["uint4", "uint4", "uint3", "uint3"]
    assert allocate_randomly(items, 1430, 1).num_bytes == 1400
    for other in (allocate_uniformly, lambda items, budget: allocate_randomly(items, budget, 0)):
        with pytest.raises(
            ValueError, match="799 bytes are not enough: the smallest options take 800"
        ):
            other(items, 799)
