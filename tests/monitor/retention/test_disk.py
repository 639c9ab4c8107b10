"""A disk that fills up costs matrices first, then runs, and says so."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantwatch.domain import Block, Scope
from quantwatch.errors import StoreError
from quantwatch.store.disk import Room, Space, affordable, require_room, space
from quantwatch.store.session import Database

Usage = namedtuple("Usage", "total used free")
BLOCKS = [
    Block("int8", kind, "lens_kl", None, (Scope("layers.0"),), np.zeros((1, 2)))
    for kind in ("per_token", "topk", "per_prompt")
]


GB = 10**9


@pytest.mark.parametrize(
    ("free", "total", "expected"),
    [
        pytest.param(10_000, 10_000, Room.ENOUGH, id="small, all free"),
        pytest.param(1000, 10_000, Room.ENOUGH, id="small, 10 % free"),
        pytest.param(999, 10_000, Room.LITTLE, id="small, 9.99 % free"),
        pytest.param(300, 10_000, Room.LITTLE, id="small, 3 % free"),
        pytest.param(299, 10_000, Room.NONE, id="small, 2.99 % free"),
        pytest.param(0, 10_000, Room.NONE, id="nothing free"),
        pytest.param(23 * GB, 252 * GB, Room.ENOUGH, id="9 % of a large disk"),
        pytest.param(10 * GB, 10_000 * GB, Room.ENOUGH, id="10 GB, 0.1 %"),
        pytest.param(10 * GB - 1, 10_000 * GB, Room.LITTLE, id="just below 10 GB, 0.1 %"),
        pytest.param(2 * GB, 10_000 * GB, Room.LITTLE, id="2 GB, 0.02 %"),
        pytest.param(2 * GB - 1, 10_000 * GB, Room.NONE, id="just below 2 GB, 0.02 %"),
    ],
)
def test_how_much_room_there_is(free: int, total: int, expected: Room) -> None:
    """Catches limits that are read in the wrong direction, one too early, one that is alone."""
    assert Space(free, total).room is expected


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("free", "kinds", "runs"),
    [
        (50, ["per_token", "topk", "per_prompt"], True),
        (5, ["per_prompt"], True),
        (1, ["per_prompt"], False),
    ],
)
def test_what_is_given_up(
    db: Database, monkeypatch: pytest.MonkeyPatch, free: int, kinds: list[str], runs: bool
) -> None:
    """Catches a night of matrices that fills the disk, and statistics given up for nothing."""
    looked: list[Path] = []

    def usage(path: Path) -> Usage:
        looked.append(path)
        return Usage(100, 100 - free, free)

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert [block.kind for block in affordable(db, BLOCKS)] == kinds
    if runs:
        require_room(db)
    else:
        with pytest.raises(
            StoreError, match=r"Only 1.0% \(.* GB\) of the disk.*3% and 2 GB nothing"
        ):
            require_room(db)
    assert {path.name for path in looked} == {str(db.url).split("/")[-2]}


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_servers_disk_is_its_own(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches runs refused because of the disk of another machine."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(100, 100, 0))
    assert space(db) is None
    require_room(db)
    assert len(list(affordable(db, BLOCKS))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_run_is_refused_before_it_measures(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a guard that nobody asks, and a full disk that looks like a regression."""
    from quantwatch.pipeline.claimed import run_claimed
    from quantwatch.pipeline.reasons import explain

    monkeypatch.setattr("quantwatch.store.disk.space", lambda _: Space(1, 100))
    nothing: Any = None
    with pytest.raises(StoreError, match="of the disk") as caught:
        run_claimed(nothing, db, nothing, nothing)
    assert (explain(caught.value).code, explain(caught.value).retryable) == ("storage_error", True)
