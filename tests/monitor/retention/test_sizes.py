"""Sizes by tier, growth, and when the disk is full."""

from typing import Any

import pytest

from quantwatch.config.service import RetentionConfig
from quantwatch.store import disk
from quantwatch.store.retention import step
from quantwatch.store.session import Database
from quantwatch.store.sizes import Flow, full_in_days, read_sizes

Stored = Any
FOREVER = 1e9


@pytest.mark.parametrize(
    ("flows", "free", "days"),
    [
        pytest.param([], 100, None, id="nothing grows"),
        pytest.param([(10, FOREVER)], 100, 10, id="one tier"),
        pytest.param([(10, FOREVER), (15, FOREVER)], 100, 4, id="two tiers add up"),
        pytest.param([(10, 5)], 100, None, id="retention catches up first"),
        pytest.param([(10, 5), (1, FOREVER)], 100, 50, id="fast for 5 days, then slow"),
        pytest.param([(1, FOREVER), (10, 5)], 100, 50, id="in any order"),
        pytest.param([(10, 0), (5, FOREVER)], 100, 20, id="a tier that is steady already"),
        pytest.param([(0, FOREVER)], 100, None, id="a tier without bytes"),
        pytest.param([(10, 10)], 100, 10, id="full on the very last day"),
    ],
)
def test_when_the_disk_is_full(
    flows: list[tuple[float, float]], free: float, days: float | None
) -> None:
    """Catches a forecast that forgets retention, or extrapolates the first week for ever."""
    found = full_in_days([Flow("t", rate, left) for rate, left in flows], free)
    assert found == (None if days is None else pytest.approx(days))


def test_sizes_by_table_and_tier(db: Database, stored: Stored, config: RetentionConfig) -> None:
    """Catches a table that no tier counts, and sizes without indexes."""
    stored.nightly(range(5))
    sizes = read_sizes(db, config)
    tiers = {tier.name: tier for tier in sizes.tiers}
    assert tiers["token matrices"].num_rows == 5 * 6
    assert tiers["prompt sums"].num_rows == 5
    assert tiers["layer statistics"].num_rows == 5 * (3 + 2)
    assert {table.name: table.num_rows for table in sizes.tables} == stored.counts()
    assert all(table.num_bytes > 0 for table in sizes.tables)
    measured = sum(table.num_bytes for table in sizes.tables)
    assert abs(sum(tier.num_bytes for tier in sizes.tiers) - measured) <= 2
    assert measured <= sizes.total_bytes
    assert [t.num_bytes for t in sizes.tables] == sorted(t.num_bytes for t in sizes.tables)[::-1]


def test_growth_follows_retention(
    db: Database, stored: Stored, config: RetentionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a forecast of years' worth of matrices that are thrown away after two nights."""
    monkeypatch.setattr(disk, "space", lambda _: disk.Space(10**9, 10**10))
    assert read_sizes(db, config).flows == ()
    stored.nightly(range(15))
    step(db, config)
    sizes = read_sizes(db, config)
    left = {(flow.tier, round(flow.days_left)) for flow in sizes.flows}
    assert ("token matrices", 0) in left, "two runs are kept, and are there"
    assert ("prompt sums", 0) in left, "ten days are kept"
    assert {("layer statistics", 16), ("layer statistics", 346), ("runs", 346)} <= left
    layers = [flow.bytes_per_day for flow in sizes.flows if flow.tier == "layer statistics"]
    assert layers[1] / sum(layers) == pytest.approx(1 / 7, rel=0.1), "one run a week stays"
    assert 0 < sizes.bytes_per_day < sizes.total_bytes
    assert sizes.full_in_days is None, "a gigabyte is more than a year of this"
    monkeypatch.setattr(disk, "space", lambda _: None)
    assert read_sizes(db, config).full_in_days is None


def test_a_full_disk_is_foreseen(
    db: Database, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a forecast that never says anything but "never"."""
    config = RetentionConfig()
    stored.nightly(range(4))
    monkeypatch.setattr(disk, "space", lambda _: disk.Space(0, 10**10))
    growth = read_sizes(db, config).bytes_per_day
    free = int(growth * 2)
    monkeypatch.setattr(disk, "space", lambda _: disk.Space(free, 10**10))
    sizes = read_sizes(db, config)
    assert sizes.full_in_days is not None
    assert sizes.full_in_days > 1.9
