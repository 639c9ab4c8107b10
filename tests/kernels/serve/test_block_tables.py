"""Block tables, their CSR form, what they waste, and re-laying pages out."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantwatch_kernels.serve.block_table import BlockTable
from quantwatch_kernels.serve.page_stats import (
    FetchModel,
    PageTraffic,
    copy_runs,
    runs_of_plan,
    share_of_peak,
    traffic,
)
from quantwatch_kernels.serve.paged_plan import padded_tables, plan
from quantwatch_kernels.serve.relayout import move_pages, num_moved, relayout
from quantwatch_kernels.serve.table_layout import Run, layout_of, layout_of_pool, runs_of


def table(blocks: list[int], num_tokens: int, page_size: int = 16) -> BlockTable:
    made = BlockTable(page_size)
    made.append(blocks, num_tokens)
    return made


@pytest.mark.parametrize(
    ("num_tokens", "pages", "last"),
    [(1, 1, 1), (15, 1, 15), (16, 1, 16), (17, 2, 1), (31, 2, 15), (32, 2, 16), (33, 3, 1)],
)
def test_last_page_is_never_empty(num_tokens: int, pages: int, last: int) -> None:
    """Catches last_page_len 0 where the page size divides the length (bug log 29)."""
    made = table(list(range(1, pages + 1)), num_tokens)
    assert made.last_page_len == last
    assert plan([made], 16).kv_last_page_len.tolist() == [last]
    assert plan([made], 16).kv_lengths.tolist() == [num_tokens]


@given(
    page=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 23), max_size=5),
    drops=st.lists(st.integers(0, 22), min_size=5, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_csr_equals_the_tables(
    page: int, lengths: list[int], drops: list[int], order: object
) -> None:
    """Catches an off-by-one in any array: each token's place by CSR is its slot by the table."""
    ids = list(range(1, 200))
    order.shuffle(ids)  # type: ignore[attr-defined]
    tables = []
    for length, drop in zip(lengths, drops, strict=False):
        pages = -(-length // page)
        tables.append(table([ids.pop() for _ in range(pages)], length, page))
        tables[-1].drop_before(min(drop, length - 1))
    made = plan(tables, page)
    assert made.kv_indptr[0] == 0
    assert made.kv_indices.numel() == int(made.kv_indptr[-1])
    assert all(array.dtype == torch.int32 for array in made[:4])
    assert 0 not in made.kv_indices.tolist()
    padded = padded_tables(tables, page)
    for number, one in enumerate(tables):
        begin, end = made.kv_indptr[number : number + 2].tolist()
        start = int(made.kv_start[number])
        slots = one.slot_mapping(0, one.num_tokens).tolist()
        for position in range(one.num_tokens):
            if position < start:
                assert slots[position] == -1
                continue
            at = begin + (position - start) // page
            assert at < end
            assert slots[position] == int(made.kv_indices[at]) * page + position % page
            assert int(padded[number, position // page]) == int(made.kv_indices[at])
        assert start + int(made.kv_lengths[number]) == one.num_tokens
        assert 1 <= int(made.kv_last_page_len[number]) <= page


def test_an_empty_batch_has_an_empty_plan() -> None:
    """Catches min and max of nothing."""
    made = plan([], 16)
    assert made.kv_indptr.tolist() == [0]
    assert made.kv_indices.shape == made.kv_last_page_len.shape == made.kv_lengths.shape == (0,)
    assert padded_tables([], 16).shape == (0, 0)


@pytest.mark.parametrize(
    ("window", "position", "kept_from"),
    [
        (16, 31, 1),
        (17, 31, 0),
        (15, 31, 1),
        (16, 32, 1),
        (16, 46, 1),
        (16, 47, 2),
        (1, 47, 2),
        (64, 47, 0),
    ],
)
def test_a_window_frees_only_pages_it_has_left(window: int, position: int, kept_from: int) -> None:
    """Catches W = page ± 1 (bug log 28): the query at t sees t − W + 1 … t, and no page of those goes."""
    made = table([7, 3, 9], 48)
    dropped = made.drop_before(position - window + 1)
    assert dropped == [7, 3, 9][:kept_from]
    assert made.blocks == tuple([0] * kept_from + [7, 3, 9][kept_from:])
    seen = made.slot_mapping(max(0, position - window + 1), position + 1)
    assert (seen >= 0).all()
    assert made.drop_before(0) == []
    assert int(plan([made], 16).kv_start) == 16 * kept_from


def test_tables_are_append_only() -> None:
    """Catches ids that move under a captured graph."""
    made = table([4, 2], 20)
    before = made.blocks
    assert made.blocks_needed(12) == 0
    assert made.blocks_needed(13) == 1
    made.append([], 12)
    made.append([9], 1)
    assert made.blocks[:2] == before
    assert made.slot_mapping(31, 33).tolist() == [2 * 16 + 15, 9 * 16]
    copy = made.fork()
    copy.append([], 1)
    copy.replace_last(5)
    assert made.blocks == (4, 2, 9)
    assert copy.blocks == (4, 2, 5)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: BlockTable(0), "page_size must be at least 1"),
        (lambda: table([1], 17), "17 more tokens need 2 blocks; got 1"),
        (lambda: table([1, 2], 16), "16 more tokens need 1 blocks; got 2"),
        (lambda: table([0], 3), "not the null block"),
        (lambda: table([4, 4], 32), "distinct"),
        (lambda: table([1], 3).append([1], 16), "distinct"),
        (lambda: table([1], 3).blocks_needed(-1), "num_new must be at least 0"),
        (lambda: table([1], 3).slot_mapping(0, 4), "aren't within the table's 3 tokens"),
        (lambda: table([1], 3).drop_before(4), "position is 4; the table has 3 tokens"),
        (lambda: table([1], 3).replace_last(1), "can't take the place"),
        (lambda: table([1], 3).rebind([1, 2]), "2 blocks don't fit a table of 1 pages"),
        (lambda: table([1], 3).rebind([0]), "don't fit"),
        (lambda: BlockTable(16).last_page_len, "the table is empty"),
        (lambda: plan([BlockTable(16)], 16), "table 0 has no tokens"),
        (lambda: plan([table([1], 3, 8)], 16), "table 0 has pages of 8 tokens; the pool's have 16"),
        (
            lambda: layout_of_pool({"a": table([1], 1, 8), "b": table([1], 1)}),
            r"pages of \[8, 16\] tokens",
        ),
        (lambda: relayout([table([9], 3)], 4), "table 0 names block 9 of 4"),
        (lambda: move_pages([torch.zeros(3, 2)], [0, 1]), "plane 0 has 3 pages, not 2"),
        (lambda: move_pages([torch.zeros(3, 2)], [0, 1, 1]), "no permutation"),
        (lambda: FetchModel(0, 1), "unit_pages must be at least 1"),
        (lambda: FetchModel(1, 0), "resident_units must be at least 1"),
        (lambda: traffic([], FetchModel(1, 1), 0), "page_bytes must be at least 1"),
        (lambda: traffic([], FetchModel(1, 1), 8).miss_rate, "no page was read"),
        (lambda: traffic([], FetchModel(1, 1), 8).bytes_per_token, "no token was decoded"),
        (lambda: traffic([], FetchModel(1, 1), 8).useful, "nothing was moved"),
        (
            lambda: copy_runs(torch.zeros(4, 2), [Run(1, 2)], torch.zeros(3, 2)),
            r"\[2, 2\] is needed",
        ),
        (lambda: share_of_peak(1, 0.0, 1.0), "seconds and peak above 0"),
    ],
)
def test_bad_input(step: Callable[[], object], message: str) -> None:
    """Catches figures of nothing, and tables that don't fit their pool."""
    with pytest.raises(ValueError, match=message):
        step()


def test_layout_by_hand() -> None:
    """Catches waste as free ÷ total, shared pages counted twice, and neighbours in the wrong order."""
    pool = layout_of_pool(
        {"a": table([1, 2, 3, 7, 6], 70), "b": table([1, 9], 24), "c": table([5], 16)}
    )
    first, second, third = pool.rows
    assert first.runs == (Run(1, 3), Run(7, 1), Run(6, 1))
    assert (first.num_pages, first.mergeable, first.contiguity) == (5, 2, 0.5)
    assert first.waste == pytest.approx(10 / 80)
    assert (second.contiguity, third.contiguity, third.waste) == (0.0, 1.0, 0.0)
    # Block 1 is shared: 7 pages of 16 slots, 70 + 8 + 16 tokens.
    assert (pool.num_slots, pool.num_tokens) == (7 * 16, 70 + 8 + 16)
    assert pool.waste == pytest.approx(1 - 94 / 112)
    assert (pool.num_runs, pool.table_bytes) == (6, 4 * 8)
    assert pool.contiguity == pytest.approx(2 / 5)


def test_layout_of_nothing_and_of_dropped_pages() -> None:
    """Catches a division by zero, and pages that aren't there any more."""
    assert layout_of_pool({}).waste == 0.0
    assert layout_of_pool({}).contiguity == 1.0
    made = table([4, 5, 6], 40)
    made.drop_before(17)
    assert layout_of("a", made).num_tokens == 24
    assert layout_of("a", made).runs == (Run(5, 2),)


def test_waste_at_512_tokens_is_below_4_percent() -> None:
    """The issue's figure: lengths 497 … 512 + 16 waste 7.5 of their slots, 1.4 %."""
    tables = {}
    for number, length in enumerate(range(505, 521)):
        pages = -(-length // 16)
        tables[str(number)] = table(list(range(1 + 40 * number, 1 + 40 * number + pages)), length)
    found = layout_of_pool(tables).waste
    assert found == pytest.approx(7.5 / (512.5 + 7.5))
    assert found < 0.04


@given(blocks=st.lists(st.integers(1, 30), unique=True))
def test_runs_are_the_blocks(blocks: list[int]) -> None:
    """Catches a run that is cut or grows: written out again they are the same ids, and are longest."""
    runs = runs_of(blocks)
    assert [run.first + k for run in runs for k in range(run.length)] == blocks
    assert all(a.first + a.length != b.first for a, b in pairwise(runs))


@given(
    order=st.permutations(range(1, 12)),
    cuts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    shared=st.booleans(),
)
def test_relayout_makes_contiguous_and_keeps_every_byte(
    order: list[int], cuts: list[int], shared: bool
) -> None:
    """Catches a page overwritten before it was read, a lost page, and NaN payloads that changed."""
    ids, tables = list(order), []
    for count in cuts:
        tables.append(table([ids.pop() for _ in range(count)], count * 16))
    if shared:
        tables.append(tables[0].fork())
    bits = torch.arange(12 * 3, dtype=torch.int32).reshape(12, 3) * 1_000_003 - 7
    planes = [bits.view(torch.float32).clone(), bits.to(torch.uint8).clone()]
    before = [plane.clone() for plane in planes]
    new_of = relayout(tables, 12)
    assert sorted(new_of) == list(range(12))
    assert new_of[0] == 0
    move_pages(planes, new_of)
    for old, new in enumerate(new_of):
        for plane, was in zip(planes, before, strict=True):
            assert torch.equal(plane[new].view(torch.uint8), was[old].view(torch.uint8))
    for one in tables:
        one.renumber(new_of)
    assert all(len(runs_of(one.blocks)) == 1 for one in tables)
    assert num_moved(relayout(tables, 12)) == 0


def test_traffic_by_hand() -> None:
    """Two units of two pages at hand; pages 1 2 | 3 4 of two sequences, twice over, and scattered."""
    tidy = [plan([table([2, 3], 32), table([4, 5], 20)], 16)] * 2
    found = traffic(tidy, FetchModel(2, 2), 100)
    assert found == PageTraffic(references=8, misses=2, num_tokens=4, page_bytes=100, unit_pages=2)
    assert (found.miss_rate, found.bytes_per_token, found.useful) == (0.25, 100.0, 2.0)
    untidy = [plan([table([2, 4], 32), table([6, 9], 20)], 16)] * 2
    found = traffic(untidy, FetchModel(2, 2), 100)
    assert (found.misses, found.miss_rate, found.bytes_per_token) == (8, 1.0, 400.0)
    assert found.useful == 0.5


def test_least_recent_unit_leaves() -> None:
    """Catches first-in-first-out: page 1 is used again before page 3 comes, so 2 has to go."""
    steps = [plan([table([block], 1)], 16) for block in (1, 2, 1, 3, 1, 2)]
    assert traffic(steps, FetchModel(1, 2), 1).misses == 4


@given(order=st.permutations(range(1, 13)), unit=st.integers(1, 4), at_hand=st.integers(1, 6))
def test_misses_are_bounded(order: list[int], unit: int, at_hand: int) -> None:
    """Laws: at least each unit once, at most each reference; with room for all, each unit once."""
    steps = [plan([table(list(order[:5]), 80), table(list(order[5:9]), 50)], 16)] * 3
    units = len({page // unit for page in order[:9]})
    found = traffic(steps, FetchModel(unit, at_hand), 8)
    assert units <= found.misses <= found.references == 27
    assert traffic(steps, FetchModel(unit, units), 8).misses == units


def test_copies_by_run_are_the_pages() -> None:
    """Catches runs that reach over into the next sequence, or pages out of order."""
    plane = torch.randn(12, 2, 3)
    made = plan([table([4, 5, 9], 40), table([10, 1], 20)], 16)
    runs = runs_of_plan(made)
    assert runs == (Run(4, 2), Run(9, 1), Run(10, 1), Run(1, 1))
    out = torch.empty(5, 2, 3)
    copy_runs(plane, runs, out)
    assert torch.equal(out, plane[[4, 5, 9, 10, 1]])
    assert share_of_peak(2_000_000, 0.001, 8e9) == 0.25
