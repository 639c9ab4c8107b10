"""The tables of block management: what they print is what pool, tables and traces say."""

from pathlib import Path

import pytest
import torch

from quantwatch.kernel_lab.paging import PAGE_SIZE, serve
from quantwatch.kernel_lab.tables import block_table, blocks, eviction
from quantwatch.kernel_lab.tables.model import Table, TableRequest, to_markdown


def records(table: Table) -> list[dict[str, object]]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def test_serving_leaves_requests_running_and_loses_no_page() -> None:
    """Catches a churn that leaks: after everything is finished the pool is whole."""
    served = serve(3, 60, running=5, num_blocks=200)
    manager = served.manager
    assert len(manager.tables) == 5
    assert served.num_started > 5
    used = {block for table in manager.tables.values() for block in table.blocks}
    assert manager.pool.num_used == len(used)
    again = serve(3, 60, running=5, num_blocks=200).manager
    assert {n: t.blocks for n, t in again.tables.items()} == {
        n: t.blocks for n, t in manager.tables.items()
    }
    for name in list(manager.tables):
        manager.finish(name)
    assert manager.pool.num_free == 199


def test_a_small_pool_makes_requests_wait() -> None:
    """Catches a churn that dies when the pool is full."""
    served = serve(3, 60, running=5, num_blocks=130)
    assert served.num_waited > 0
    assert served.manager.pool.num_used <= 129


def test_blocks_table(tmp_path: Path) -> None:
    """Catches rows swapped, and a re-laying out that isn't one: fewer copies, misses and bytes."""
    table = blocks.build(TableRequest(tmp_path, quick=True))
    before, after = records(table)
    assert (before["layout"], after["layout"]) == ("as served", "re-laid out")
    assert before["waste"] == after["waste"]
    waste = float(str(before["waste"]))
    assert 0 < waste < 0.04
    manager = serve(0, 300).manager
    read = sum(len(one.blocks) for one in manager.tables.values()) / len(manager.tables)
    for name, larger in (
        *(("contiguity", after), ("pages_per_copy", after), ("useful", after)),
        *(("copies", before), ("miss_rate", before), ("kib_per_token", before)),
    ):
        smaller = before if larger is after else after
        assert float(str(larger[name])) > float(str(smaller[name])), name
    for row in (before, after):
        moved, useful = float(str(row["kib_per_token"])), float(str(row["useful"]))
        # What is read per token is the pages of a sequence, wherever they lie: 12 KiB each.
        assert moved * useful == pytest.approx(read * 2 * PAGE_SIZE * 3 * 64 * 2 / 1024)
        assert all(float(str(row[name])) > 0 for name in ("peak_share", "gather_share", "peak_low"))
    assert "24 requests" in table.notes[0]


def test_relayout_moves_content_with_ids() -> None:
    """Catches ids that move without their pages: every request still reads its own."""
    manager = serve(1, 40, running=6, num_blocks=300).manager
    plane = torch.arange(300 * 4).reshape(300, 4)
    before = {name: plane[list(table.blocks)] for name, table in manager.tables.items()}
    manager.relayout([plane])
    for name, table in manager.tables.items():
        assert torch.equal(plane[list(table.blocks)], before[name])


def test_block_table(tmp_path: Path) -> None:
    """Catches empty slots of another page size, and runs that aren't the table's."""
    table = block_table.build(TableRequest(tmp_path, quick=True))
    manager = serve(0, 300).manager
    assert [row["request"] for row in records(table)] == list(manager.tables)
    for row, one in zip(records(table), manager.tables.values(), strict=True):
        assert row["tokens"] == one.num_tokens
        assert row["pages"] == len(one.blocks)
        assert row["empty"] == -one.num_tokens % PAGE_SIZE
        assert int(str(row["mergeable"])) + int(str(row["runs"])) == len(one.blocks)
        first, _, _ = str(row["blocks"]).partition(",")
        assert first.partition("–")[0] == str(one.blocks[0])
    assert "all together: waste" in to_markdown(table)


def test_eviction_table(tmp_path: Path) -> None:
    """The issue's figure: LRU ≤ LRU-2 ≤ Belady on the recorded trace."""
    table = eviction.build(TableRequest(tmp_path, quick=True))
    (row,) = records(table)
    lru, lru_k, belady = (float(str(row[name])) for name in ("lru", "lru_k", "belady"))
    assert lru <= lru_k <= belady
    assert row["closed"] == pytest.approx((lru_k - lru) / (belady - lru))
    assert (row["trace"], row["pool"]) == ("applications", 1637)
