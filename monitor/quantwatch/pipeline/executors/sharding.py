"""How many processes measure a check, with how many threads each; decided before any is loaded."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from quantwatch.config.schema import CheckConfig
from quantwatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sharding:
    """`num_shards` processes of `threads` threads each. The threads are part of the numbers."""

    executor: Literal["local", "ray"]
    threads: int
    num_shards: int | None
    """None: as many as Ray's cluster has room for, which only it can tell."""
    address: str | None = None
    """Of a Ray cluster; None: one that is started here and ends with the run."""
    notes: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether all processes share this machine."""
        return self.address is None


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sharding_of(check: CheckConfig) -> Sharding | None:
    """Return how a check is spread, None when this process measures it.

    Raises ConfigError when more threads would compute than there are cores.
    """
    if check.executor == "inline":
        return None
    threads = check.threads or torch.get_num_threads()
    if check.ray_address is not None:
        return Sharding("ray", threads, check.shards, check.ray_address)
    room, notes = cores(), list[str]()
    if check.shards is None and room // threads <= 1 and check.threads is None:
        notes.append(
            f"one process of {threads} threads fills {room} cores; threads = 1 allows more"
        )
    shards = check.shards or max(1, room // threads)
    if shards > 1 and shards * threads > room:
        told = f"threads = {threads}" if check.threads else f"{threads} threads, the default,"
        raise ConfigError(
            f'executor = "{check.executor}": shards = {shards} with {told} each would compute on '
            f"{shards * threads} threads, and this process may use {room} cores; allowed: shards "
            f"up to {max(1, room // threads)}, or fewer threads"
        )
    return Sharding(check.executor, threads, shards, notes=tuple(notes))
