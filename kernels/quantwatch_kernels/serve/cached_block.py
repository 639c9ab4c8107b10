"""What a prefix cache knows of a block, and what it counts."""

from dataclasses import dataclass, field

from quantwatch_kernels.serve.block_hash import ExtraKeys

__all__ = ["CacheStats", "CachedBlock"]


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One full block that can be found: what it contains and where it is."""

    block: int
    digest: bytes
    tokens: tuple[int, ...]
    extra: ExtraKeys
    parent: "CachedBlock | None"
    children: set["CachedBlock"] = field(default_factory=set)
    depth: int = 0
    alive: bool = True
    """False if it could not be kept, or was given up; nothing is entered below it then."""


@dataclass(slots=True)
class CacheStats:
    """Counts since the cache was made."""

    queries: int = 0
    """Full blocks that requests asked for."""
    hits: int = 0
    evictions: int = 0
    collisions: int = 0
    """Contents not kept, or not found, because another has their digest."""

    @property
    def hit_rate(self) -> float:
        """Hits ÷ queries. Raises ValueError before the first query."""
        if self.queries == 0:
            raise ValueError("no block has been asked for, so there is no hit rate.")
        return self.hits / self.queries
