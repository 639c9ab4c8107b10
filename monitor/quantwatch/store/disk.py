"""The guard against a full disk: first matrices are given up, then runs, never what is stored."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from quantwatch.domain import Block
from quantwatch.errors import StoreError
from quantwatch.observability import logs
from quantwatch.store.pruning import TOKEN_KINDS
from quantwatch.store.session import Database
from quantwatch.store.urls import SqliteFile, parse_url

LOW, NONE = 0.10, 0.03
"""Free shares of the database's disk below which there is little room, and no room …"""
LOW_BYTES, NONE_BYTES = 10 * 10**9, 2 * 10**9
"""… unless so much is free that the share doesn't matter: a tenth of a large disk is years."""

log = logs.get(__name__)


class Room(StrEnum):
    """`little`: matrices per token are not kept. `none`: nothing is measured."""

    ENOUGH = "enough"
    LITTLE = "little"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Space:
    """The disk under a database, bytes."""

    free: int
    total: int

    @property
    def free_ratio(self) -> float:
        """Free share of the disk, 0 … 1."""
        return self.free / self.total

    @property
    def room(self) -> Room:
        """How much may be written: both the share and the bytes must be low to give up anything."""
        if self.free_ratio < NONE and self.free < NONE_BYTES:
            return Room.NONE
        is_low = self.free_ratio < LOW and self.free < LOW_BYTES
        return Room.LITTLE if is_low else Room.ENOUGH


def space(db: Database) -> Space | None:
    """Return the disk under a SQLite file; None for a server's, which doesn't tell."""
    url = parse_url(db.url)
    if url.get_backend_name() != "sqlite":
        return None
    return space_at(SqliteFile.of(url).path.parent)


def space_at(folder: Path) -> Space:
    """Return the disk under a folder."""
    usage = shutil.disk_usage(folder)
    return Space(usage.free, usage.total)


def require_room(db: Database) -> None:
    """Raise StoreError when a run would fill the disk; checked before anything is measured."""
    found = space(db)
    if found is not None and found.room is Room.NONE:
        raise StoreError(
            f"Only {found.free_ratio:.1%} ({found.free / 1e9:.2f} GB) of the disk of database "
            f"{db.name} is free; below {NONE:.0%} and {NONE_BYTES / 1e9:.0f} GB nothing is "
            "measured: free some space, or shorten [retention]."
        )


def affordable(db: Database, blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield the blocks there is room for: without matrices per token when there is little."""
    found = space(db)
    if found is None or found.room is Room.ENOUGH:
        yield from blocks
        return
    log.warning("matrices per token are not kept", free_bytes=found.free, needed=LOW_BYTES)
    yield from (block for block in blocks if block.kind not in TOKEN_KINDS)
