"""The guard against a full disk: first matrices are given up, then runs, never what is stored."""

import shutil
from collections.abc import Iterable, Iterator
from enum import StrEnum

from quantwatch.domain import Block
from quantwatch.errors import StoreError
from quantwatch.observability import logs
from quantwatch.store.pruning import TOKEN_KINDS
from quantwatch.store.session import Database
from quantwatch.store.urls import SqliteFile, parse_url

LOW, NONE = 0.10, 0.03
"""Free shares of the database's disk below which there is little room, and no room."""

log = logs.get(__name__)


class Room(StrEnum):
    """`little`: matrices per token are not kept. `none`: nothing is measured."""

    ENOUGH = "enough"
    LITTLE = "little"
    NONE = "none"


def room(free_ratio: float | None) -> Room:
    """Judge a free share of the disk; None, a server that doesn't tell, counts as enough."""
    if free_ratio is None or free_ratio >= LOW:
        return Room.ENOUGH
    return Room.LITTLE if free_ratio >= NONE else Room.NONE


def free_bytes(db: Database) -> tuple[int, int] | None:
    """Return the free and all bytes of the disk under a SQLite file; None for a server's."""
    url = parse_url(db.url)
    if url.get_backend_name() != "sqlite":
        return None
    usage = shutil.disk_usage(SqliteFile.of(url).path.parent)
    return usage.free, usage.total


def free_ratio(db: Database) -> float | None:
    """Return the free share of the disk under a SQLite file; None for a server's."""
    found = free_bytes(db)
    return None if found is None else found[0] / found[1]


def require_room(db: Database) -> None:
    """Raise StoreError when a run would fill the disk; checked before anything is measured."""
    free = free_ratio(db)
    if room(free) is Room.NONE:
        raise StoreError(
            f"Only {free:.1%} of the disk of database {db.name} is free; below {NONE:.0%} nothing "
            "is measured: free some space, or shorten [retention]."
        )


def affordable(db: Database, blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield the blocks there is room for: without matrices per token when there is little."""
    free = free_ratio(db)
    if room(free) is Room.ENOUGH:
        yield from blocks
        return
    log.warning("matrices per token are not kept", free_ratio=free, needed=LOW)
    yield from (block for block in blocks if block.kind not in TOKEN_KINDS)
